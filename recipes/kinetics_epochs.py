"""What recipe kinetics says and writes as GluonCV's trainer does: its line every some batches, its lines and .params
files where an epoch ends; and the test of finished weights in several views."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from partial_fc.comm import World
from partial_fc.data import Source
from partial_fc.data.order import Order
from partial_fc.evaluate import Classification
from partial_fc.evaluate.evaluation import Forward
from partial_fc.evaluate.video import VideoViews
from partial_fc.files import warn_on_os_error
from partial_fc.foreign import gluoncv, mxnet_ndarray
from partial_fc.head import CrossEntropy
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.job import RunState
from partial_fc.train.record.log import Interval, StepLine
from partial_fc.train.run import Run


class CountedCrossEntropy(CrossEntropy):
    """Remembers how many clips of this rank were right since the epoch began (or the run), and their losses."""

    def __init__(self, num_classes: int, world: World, dtype: torch.dtype):
        super().__init__(num_classes, world, dtype)
        self.sums: Tensor | None = None  # float64: right, loss, clips

    def __call__(self, logit_BC: Tensor, label_B: Tensor) -> Tensor:
        loss = super().__call__(logit_BC, label_B)
        correct_B, loss_B = self.last_step["correct_B"].double(), self.last_step["loss_B"].double()
        sums = torch.stack((correct_B.sum(), loss_B.sum(), torch.ones_like(loss_B).sum()))
        self.sums = sums if self.sums is None else self.sums + sums
        return loss

    def means(self) -> tuple[float, float]:
        """(share of right ones, mean loss) of this rank's clips so far."""
        assert self.sums is not None
        correct, loss, count = self.sums.tolist()
        return correct / count, loss / count


@dataclass(frozen=True)
class ClipLine(StepLine):
    """GluonCV's line, every `frequent` updates of an epoch: accuracy in percent, batches counted from 0, as it prints
    them. Accuracy and loss are of this process and epoch so far. An update that goes on into the next epoch belongs to
    the one where it began."""

    batch_size: int  # of all processes in one forward
    update_size: int
    head: CountedCrossEntropy

    def due(self, step: int, position: int) -> bool:
        return (self._batch(position)[1] + 1) % self.frequent == 0

    def text(self, step: int, position: int, loss: float, lr: float, since: Interval) -> str:
        epoch, batch = self._batch(position)
        per_epoch = math.ceil(self.num_samples / self.update_size)
        accuracy, mean_loss = self.head.means()
        # "500 images/s, 250 per rank | data 3%, ... | 0:10:00 left": where the time went is more than GluonCV says.
        spent = since.words.partition(" | ")[2]
        return (
            f"Epoch[{epoch:03d}] Batch [{batch:04d}]/[{per_epoch:04d}]\tSpeed: {since.images_per_s:f} samples/sec\t "
            f"accuracy={accuracy * 100:f}\t loss={mean_loss:f}\t lr={lr:f}\t {spent}"
        )

    def _batch(self, position: int) -> tuple[int, int]:
        """(epoch, update of it), both from 0, that ended at this position."""
        epoch, place = divmod(position - self.batch_size, self.num_samples)
        return epoch, place // self.update_size


class EpochEnd:
    """The evaluation of recipe kinetics: validation, where there is a list, GluonCV's lines, and its .params files, on
    every host."""

    board = ""

    def __init__(
        self,
        run: Run,
        backbone: TorchBackbone,
        head: CountedCrossEntropy,
        val_source: Source | None,
        order: Order,
        start: RunState,
    ):
        self._run, self._module, self._head, self._order = run, backbone.module, head, order
        self._at = start
        self._began, self._position = time.perf_counter(), start.position
        self._best = start.best.get("val", 0.0)
        self._test: Classification | None = None
        if val_source is not None:
            transform = run.config.data.transform(random=False)
            self._test = Classification("val", val_source, transform, run.config.optim.batch_size)
        self._lines: list[str] = []

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        """A collective."""
        batch_size = self._run.config.optim.batch_size * world.size
        epoch = max(0, self._at.position - batch_size) // self._order.num_samples
        seconds = max(time.perf_counter() - self._began, 1e-9)
        self._lines = []
        if self._head.sums is not None:
            correct, loss, count = world.all_reduce(self._head.sums.cpu(), name="epoch/training").tolist()
            self._head.sums = None
            self._lines = [
                f"[Epoch {epoch:03d}] training: accuracy={correct / count * 100:f}\t loss={loss / count:f}",
                f"[Epoch {epoch:03d}] speed: {(self._at.position - self._position) / seconds:.0f} samples/sec\t"
                f"time cost: {seconds:f}",
            ]
            yield "train/accuracy", correct / count
        accuracy = 0.0
        if self._test:
            values = dict(self._test.run(forward, world))
            yield from values.items()
            accuracy = values["val/accuracy"]
            self._lines.append(
                f"[Epoch {epoch:03d}] validation: acc-top1={accuracy * 100:f} "
                f"acc-top5={values[f'val/top{self._test.top}'] * 100:f} loss={self._test.loss:f}"
            )
        if world.local_rank == 0 and self._lines:
            self._write(epoch, accuracy)
        self._best = max(self._best, accuracy)
        self._began, self._position = time.perf_counter(), self._at.position

    def _write(self, epoch: int, accuracy: float) -> None:
        """The best one so far, or one every --save-frequency epochs; always the last."""
        config, root = self._run.config, self._run.root
        name = f"{config.data.dataset}-{config.model.model}-{epoch:03d}"
        every, names = config.model.save_frequency, []
        if accuracy > self._best:
            names.append(f"{accuracy:.4f}-{name}-best.params")
        elif every and (epoch + 1) % every == 0:
            names.append(f"{name}.params")
        if epoch + 1 >= config.schedule.epochs and f"{name}.params" not in names:
            names.append(f"{name}.params")
        arrays = {key: t.detach().float().cpu().contiguous() for key, t in gluoncv.arrays(self._module).items()}
        for file in names:
            with warn_on_os_error(str(root / file)):
                mxnet_ndarray.write(root / file, arrays)

    def scores(self, values: Mapping[str, float]) -> dict[str, float]:
        return self._test.scores(values) if self._test else {}

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        return self._lines

    def draw(self, folder: Path) -> None:
        if self._test:
            self._test.draw(folder)


def measure(run: Run, backbone: TorchBackbone, source: Source) -> int:
    """--eval: one line, and the picture of the surest mistakes. A collective."""
    config = run.config
    views = VideoViews(
        "test",
        source,
        config.data.transform(random=False),
        config.optim.batch_size,
        num_segments=config.model.num_segments,
        three_crop=config.model.three_crop,
        scores=config.model.view_scores,
    )
    with backbone.evaluating() as forward:
        values = dict(views.run(forward, run.world))
    for line in views.lines(0, 0.0, values, views.scores(values)):
        run.logger.info(line)
    if run.world.rank == 0:
        views.draw(run.root)
    run.world.close()
    return 0
