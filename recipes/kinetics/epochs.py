"""GluonCV's files and output in recipe kinetics: the start from its files, its line every few batches, its lines and
.params files at the end of an epoch; and the multi-view test of finished weights."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from partial_fc.accessories import spare
from partial_fc.checkpoint.consistency import check_replicas
from partial_fc.comm import World
from partial_fc.data import Source
from partial_fc.data.order import Order
from partial_fc.evaluate.classification import Classification
from partial_fc.evaluate.evaluation import Evaluation, Forward
from partial_fc.flags import ScheduleFlags
from partial_fc.foreign import ndarray_file
from partial_fc.head import CrossEntropy
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.job import Hooks, RunState
from partial_fc.train.record.log import Interval, StepLine
from partial_fc.train.run import Run

from . import gluoncv_files as gluoncv
from .views import VideoViews


class CountedCrossEntropy(CrossEntropy):
    """Counts this rank's correct clips since the epoch (or the run) began, and sums their losses."""

    def __init__(self, num_classes: int, world: World, dtype: torch.dtype):
        super().__init__(num_classes, world, dtype)
        self.sums: Tensor | None = None  # float64: correct, loss, clips

    def __call__(self, logit_BC: Tensor, label_B: Tensor) -> Tensor:
        loss = super().__call__(logit_BC, label_B)
        correct_B, loss_B = self.last_step["correct_B"].double(), self.last_step["loss_B"].double()
        sums = torch.stack((correct_B.sum(), loss_B.sum(), torch.ones_like(loss_B).sum()))
        self.sums = sums if self.sums is None else self.sums + sums
        return loss

    def means(self) -> tuple[float, float]:
        """Returns (accuracy, mean loss) of this rank's clips so far."""
        assert self.sums is not None
        correct, loss, count = self.sums.tolist()
        return correct / count, loss / count


@dataclass(frozen=True)
class ClipLine(StepLine):
    """GluonCV's line, every `frequent` updates of an epoch: accuracy in percent, batches counted from 0. Accuracy and
    loss are of this process and epoch so far. An update across epochs belongs to the one where it began."""

    batch_size: int  # of all processes in one forward
    update_size: int
    head: CountedCrossEntropy

    def due(self, step: int, position: int) -> bool:
        return (self._batch(position)[1] + 1) % self.frequent == 0

    def text(self, step: int, position: int, loss: float, lr: float, since: Interval) -> str:
        epoch, batch = self._batch(position)
        per_epoch = math.ceil(self.num_samples / self.update_size)
        accuracy, mean_loss = self.head.means()
        # "500 images/s, 250 per rank | data 3%, ... | 0:10:00 left": GluonCV does not print where time is spent.
        spent = since.words.partition(" | ")[2]
        return (
            f"Epoch[{epoch:03d}] Batch [{batch:04d}]/[{per_epoch:04d}]\tSpeed: {since.samples_per_s:f} samples/sec\t "
            f"accuracy={accuracy * 100:f}\t loss={mean_loss:f}\t lr={lr:f}\t {spent}"
        )

    def _batch(self, position: int) -> tuple[int, int]:
        """Returns (epoch, its update), both from 0, that ended at this position."""
        epoch, place = divmod(position - self.batch_size, self.num_samples)
        return epoch, place // self.update_size


class Training(Evaluation):
    """Accuracy and loss on all ranks' training data since the epoch began, with GluonCV's lines."""

    def __init__(self, head: CountedCrossEntropy, batch_size: int, order: Order):
        self._head, self._batch_size, self._order = head, batch_size, order
        self.counted = False  # whether there was an update since the last time
        self._accuracy = self._loss = 0.0
        self.restart(0)

    def restart(self, position: int) -> None:
        """Restarts the speed measurement."""
        self._began, self._position = time.perf_counter(), position

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        """Yields the values. A collective."""
        self.counted = self._head.sums is not None
        self._seconds = max(time.perf_counter() - self._began, 1e-9)
        if self._head.sums is not None:
            correct, loss, count = world.all_reduce(self._head.sums.cpu(), name="epoch/training").tolist()
            self._head.sums, self._accuracy, self._loss = None, correct / count, loss / count
            yield "train/accuracy", self._accuracy

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        if not self.counted:
            return []
        position = round(epoch * self._order.num_samples)
        name = f"[Epoch {epoch_of(position, self._batch_size, self._order):03d}]"
        return [
            f"{name} training: accuracy={self._accuracy * 100:f}\t loss={self._loss:f}",
            f"{name} speed: {(position - self._position) / self._seconds:.0f} samples/sec\t"
            f"time cost: {self._seconds:f}",
        ]


class Validation(Classification):
    """The validation set, with GluonCV's line."""

    def __init__(self, config: Any, source: Source, batch_size: int, order: Order):
        super().__init__("val", source, config.data.transform(random=False), config.optim.batch_size)
        self._update, self._order = batch_size, order

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        number = epoch_of(round(epoch * self._order.num_samples), self._update, self._order)
        top1, top5 = values["val/accuracy"], values[f"val/top{self.top}"]
        return [f"[Epoch {number:03d}] validation: acc-top1={top1 * 100:f} acc-top5={top5 * 100:f} loss={self.loss:f}"]


def epoch_of(position: int, batch_size: int, order: Order) -> int:
    """Returns the epoch, from 0, in which the batch before this position began."""
    return max(0, position - batch_size) // order.num_samples


class ParamsFiles(Hooks):
    """GluonCV's .params files, on every host: the best, or one every --save-frequency epochs; always the last."""

    def __init__(self, run: Run, module: nn.Module, training: Training, val: Validation | None, order: Order):
        self._run, self._module, self._training, self._val, self._order = run, module, training, val, order
        self._best = 0.0

    def begin(self, state: RunState) -> None:
        self._best = state.best.get("val", 0.0)
        self._training.restart(state.position)

    def after_epoch(self, state: RunState, values: Mapping[str, float]) -> None:
        accuracy = values.get("val/accuracy", 0.0)
        if self._run.world.local_rank == 0 and (self._training.counted or self._val):
            self._write(state.position, accuracy)
        self._best = max(self._best, accuracy)
        self._training.restart(state.position)

    def _write(self, position: int, accuracy: float) -> None:
        config, root = self._run.config, self._run.root
        epoch = epoch_of(position, config.optim.batch_size * self._run.world.size, self._order)
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
            spare(str(root / file), ndarray_file.write, root / file, arrays)


def measure(run: Run, backbone: TorchBackbone, source: Source) -> int:
    """Runs --eval: one line. A collective."""
    config = run.config
    views = VideoViews(
        "test",
        source,
        config.data.transform(random=False),
        config.optim.batch_size,
        num_segments=config.model.num_segments,
        three_crop=config.model.three_crop,
    )
    with backbone.evaluating() as forward:
        values = dict(views.run(forward, run.world))
    for line in views.lines(0, 0.0, values, views.scores(values)):
        run.logger.info(line)
    run.world.close()
    return 0


# ---- the start: GluonCV's files, the first epoch, the epochs of learning-rate decay


def load_params(run: Run, backbone: TorchBackbone) -> None:
    """Loads weights and running statistics of a .params file. A collective."""
    gluoncv.load(backbone.module, run.config.model.resume_params)
    backbone.weights.load_state_dict(backbone.module.state_dict())
    check_replicas(backbone.replicated(), run.world)
    run.logger.info(f"started from {run.config.model.resume_params}")


def start_from(run: Run, backbone: TorchBackbone, order: Order, state: RunState) -> None:
    """Sets the start of a run that does not resume. A collective."""
    model = run.config.model
    if model.resume_params and not state.step:
        load_params(run, backbone)
    if model.resume_epoch and state.step:
        run.note(f"--resume-epoch {model.resume_epoch} is for a new run; this one resumes from its own checkpoint")
    elif model.resume_epoch:
        state.position = model.resume_epoch * order.num_samples
        state.step = state.position // run.global_batch


def decay_steps(run: Run, order: Order) -> ScheduleFlags:
    """Returns the schedule with its decay epochs converted to updates."""
    schedule, model = run.config.schedule, run.config.model
    if schedule.lr_scheduler != "step" or schedule.lr_steps or schedule.lr_step_epochs:
        return schedule
    per_epoch = order.num_samples / run.global_batch
    total = order.updates_to(0, schedule.epochs * order.num_samples, run.global_batch)
    steps = (round(epoch * per_epoch) for epoch in model.decay_epochs(schedule.epochs))
    within = tuple(sorted({step for step in steps if 0 < step < (schedule.max_steps or total)}))
    if within:
        return replace(schedule, lr_steps=within)
    run.note(f"--lr-mode step: the run ends before the rate falls (--lr-decay-epoch {model.lr_decay_epoch})")
    return replace(schedule, lr_scheduler="constant", lr_factor=0.1)
