"""Top-1 and top-5 accuracy of a classifier and its confusion matrix; rank-1 and rank-5 of vectors against the class
centres.

N samples, B of one batch, C classes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.data.sample import Sample, Source, naming
from partial_fc.data.transform import channels_first
from partial_fc.data.vectors import BLOCK, Vectors
from partial_fc.evaluate.evaluation import Evaluation, Forward, read_ahead
from partial_fc.head import PartialFC

_MOST_CLASSES = 1000  # of a confusion matrix
# Losses are summed as integer multiples of this: integer sums do not depend on the order.
_LOSS_UNIT, _LARGEST_LOSS = 2.0**-24, 2.0**12


@dataclass(frozen=True)
class Predictions:
    """What a model says of a batch, on the CPU."""

    finite_B: Tensor  # bool: the output has neither NaN nor Inf
    prediction_B: Tensor  # int64: class numbers
    top_BK: Tensor  # int64: the `top` most likely classes
    loss_B: Tensor  # float64


class Classification:
    """Evaluates labelled samples, each once and in the same batch for any number of ranks: bit-identical results."""

    board = ""

    def __init__(
        self,
        name: str,
        source: Source,
        transform: Callable[[Sample, np.random.Generator], NDArray],
        batch_size: int = 500,
        top: int = 5,
        limit: int | None = None,
    ):
        """transform: a Loader's, but deterministic. top: k of top-k accuracy. limit: use only the first samples."""
        self.name, self.source, self.transform, self.batch_size = name, source, transform, batch_size
        self.top = min(top, source.num_classes)
        self.num_samples = self.num_items = min(len(source), limit or len(source))  # an item is read as a whole
        # Results of the latest run, equal on every rank. confusion_CC: int64 counts by (label, prediction), of up to
        # 1,000 classes.
        self.confusion_CC: Tensor | None = None
        self.num_correct = 0
        self.loss = math.nan  # mean cross-entropy
        self._problem: Exception | None = None  # the first unreadable batch of this rank

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        """Yields NAME/accuracy and NAME/topK. One collective. Raises ValueError for an unusable sample,
        FloatingPointError for a NaN or Inf output, both on all ranks alike."""
        num_classes = self.source.num_classes
        cells = num_classes**2 if num_classes <= _MOST_CLASSES else 0
        counts = torch.zeros(cells + 5, dtype=torch.int64)  # then: loss, correct, among the top, NaN or Inf, unusable
        for _, input_B, label_B in self._batches(world, counts):
            seen = self._predict(forward, input_B, label_B)
            counts[-2] += int((~seen.finite_B).sum())
            counts[-5] += (seen.loss_B.nan_to_num(0).clamp(max=_LARGEST_LOSS) / _LOSS_UNIT).round().long().sum()
            counts[-4] += int((seen.prediction_B == label_B).sum())
            counts[-3] += int((seen.top_BK == label_B[:, None]).any(dim=1).sum())
            if cells:
                counts[:cells] += (label_B * num_classes + seen.prediction_B).bincount(minlength=cells)
        counts = world.all_reduce(counts, name=f"evaluate/{self.name}/counts")
        self._check(counts)
        self.confusion_CC = counts[:cells].view(num_classes, num_classes) if cells else None
        self.num_correct, self.loss = int(counts[-4]), int(counts[-5]) * _LOSS_UNIT / self.num_samples
        yield f"{self.name}/accuracy", self.num_correct / self.num_samples
        yield f"{self.name}/top{self.top}", int(counts[-3]) / self.num_samples

    def _predict(self, forward: Forward, input_B: Tensor, label_B: Tensor) -> Predictions:
        """From logits (B, C)."""
        logit_BC = forward(input_B).double().cpu()
        log_p_BC = logit_BC.log_softmax(1)
        loss_B = -log_p_BC.gather(1, label_B[:, None]).squeeze(1)
        top_BK = logit_BC.topk(self.top).indices
        return Predictions(logit_BC.isfinite().all(dim=1), log_p_BC.exp().max(1).indices, top_BK, loss_B)

    def scores(self, values: Mapping[str, float]) -> dict[str, float]:
        return {self.name: values[f"{self.name}/accuracy"]}

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        return [
            f"[{self.name}][{step}] accuracy {values[f'{self.name}/accuracy']:.5f} highest {best[self.name]:.5f} "
            f"top-{self.top} {values[f'{self.name}/top{self.top}']:.5f} ({self.num_correct:,} of {self.num_samples:,})"
        ]

    def _batches(self, world: World, counts: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields (sample numbers, inputs, labels) of this rank's batches; counts unusable ones in `counts[-1]`."""
        self._problem = None
        for index_B, input_B, label_B, error in read_ahead(
            self._read, math.ceil(self.num_items / self.batch_size), world, self.name
        ):
            if error is None:
                yield index_B, input_B, label_B
            else:
                self._problem = self._problem or error
                counts[-1] += 1

    def _read(self, batch: int) -> tuple[Tensor, Tensor, Tensor, Exception | None]:
        """Reads a batch: (sample numbers, inputs, labels, error)."""
        index_B = torch.arange(batch * self.batch_size, min((batch + 1) * self.batch_size, self.num_items))
        nothing = torch.empty(0)
        try:
            pairs = [self._load(index) for index in index_B.tolist()]
        except (ValueError, OSError) as error:
            # Not raised here: the other ranks would wait for this one. `_check` raises it on all ranks.
            return index_B, nothing, nothing, error
        arrays, labels = zip(*pairs, strict=True)
        return index_B, channels_first(torch.from_numpy(np.stack(arrays))), torch.tensor(labels), None

    def _load(self, index: int) -> tuple[NDArray, int]:
        sample = self.source.read(index)
        with naming(self.source, index):
            return self.transform(sample, np.random.default_rng(index)), sample.label

    def _check(self, counts: Tensor) -> None:
        if counts[-1]:
            raise ValueError(str(self._problem or f"{self.name}: another rank cannot read its samples, see there"))
        if counts[-2]:
            raise FloatingPointError(
                f"evaluation {self.name}: the output has NaN or Inf for {counts[-2]} of {self.num_samples} samples"
            )


_BATCH = 1024  # vectors that share one pass over the centres


class NearestClass(Evaluation):
    """Searches the classes nearest to each vector's features among all classes, sampled or not."""

    def __init__(self, name: str, source: Vectors, head: PartialFC):
        """Raises ValueError for vectors without a direction, and labels that are no class of the head."""
        self.name, self.source, self.head = name, source, head
        self.num_right = 0
        bad = source.unusable(range(0, len(source), BLOCK))
        if len(bad):
            raise ValueError(f"{source.where(int(bad[0]))}: NaN or Inf, or only zeros ({len(bad):,} such)")

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        """Yields NAME/rank1 and NAME/rank5. All ranks take part in each search, the last ones perhaps with nothing."""
        count, right_2 = len(self.source), torch.zeros(2, dtype=torch.int64)
        k = min(5, self.head.num_classes)
        firsts = range(world.rank * _BATCH, count + world.rank * _BATCH, world.size * _BATCH)
        for first in terminal.bar(firsts, desc=self.name, unit="batch", shown=world.rank == 0, leave=False):
            batch = self.source.read_batch(np.arange(min(first, count), min(first + _BATCH, count)))
            assert batch is not None
            class_BK = self.head.topk(forward(torch.from_numpy(batch[0])), k)[1].cpu()
            label_BT = torch.from_numpy(batch[1]).reshape(len(class_BK), 1, self.source.num_labels)
            is_own_BK = (class_BK[:, :, None] == label_BT).any(dim=2)
            right_2 += torch.stack((is_own_BK[:, 0].sum(), is_own_BK.any(1).sum()))
        rank1, rank5 = world.all_reduce(right_2, name=f"evaluate/{self.name}/counts").tolist()
        self.num_right = rank1
        yield f"{self.name}/rank1", rank1 / count
        yield f"{self.name}/rank5", rank5 / count

    def scores(self, values: Mapping[str, float]) -> dict[str, float]:
        return {self.name: values[f"{self.name}/rank1"]}

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        return [
            f"[{self.name}][{step}] rank-1 {values[f'{self.name}/rank1']:.5f} highest {best[self.name]:.5f} rank-5 "
            f"{values[f'{self.name}/rank5']:.5f} ({self.num_right:,} of {len(self.source):,}, "
            f"{self.head.num_classes:,} classes)"
        ]
