"""Rank-1 and rank-5 of vectors against the class centres: is the nearest centre that of their class, or of one of them?

B vectors of one batch, D their width, K nearest classes.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.data.vectors import BLOCK, Vectors
from partial_fc.evaluate.evaluation import Evaluation, Forward
from partial_fc.head import PartialFC

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
