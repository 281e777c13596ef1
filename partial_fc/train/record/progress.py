"""The progress of a run: its bar, its lines with rates and time left, its numbers on dashboards."""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from partial_fc import terminal
from partial_fc.accessories import spare
from partial_fc.comm import World
from partial_fc.train.record.boards import TensorBoard, Wandb
from partial_fc.train.record.log import Interval, StepLine

_WARM_STEPS = 10
_BAR = "the progress bar"
_log = logging.getLogger("partial_fc")


class Progress:
    """The progress of a run, with rates since the last line; a bar and dashboards on rank 0."""

    def __init__(
        self,
        models_root: Path,
        world: World,
        line: StepLine,
        step: int,
        position: int,
        wandb: Wandb | None = None,
        unit: str = "images",
    ):
        """step, position: the start of the run in this process. unit: the noun for samples."""
        self._world = world
        self._line = line
        self._unit = unit
        self._board = TensorBoard(models_root / "tensorboard", world)
        self._wandb = wandb
        self._first_step = step
        watched = world.rank == 0 and terminal.is_watched()  # else by its lines
        self._bar = spare(
            _BAR, lambda: terminal.bar(total=line.total_steps, desc="train", initial=step, unit="step", shown=watched)
        )
        self._warm = False  # the first intervals include warm-up of caches and threads
        self._num_samples = 0
        self._seconds = 0.0
        self._restart(step, position)

    @property
    def samples_per_s(self) -> float:
        """Returns the rate of all ranks, over all reported intervals except for the first steps."""
        return self._num_samples / self._seconds if self._seconds else 0.0

    def advance(self, loss: float) -> None:
        """Moves the bar by a step."""
        self._on_bar(lambda bar: bar.update())
        self._loss_sum += loss

    def rewind(self, step: int, position: int) -> None:
        """Goes back to this step as the last one done."""
        self._on_bar(lambda bar: bar.update(step - bar.n))
        self._restart(step, position)

    def due(self, step: int, position: int) -> bool:
        """Returns whether a line is due after this step, which ended at this position in the data."""
        return self._line.due(step, position) or step - self._first_step in self._line.early

    def report(
        self,
        step: int,
        position: int,
        epoch: float,
        loss: float,
        lr: float,
        shares: dict[str, float],
        loss_scale: float | None = None,
        teacher: float | None = None,
    ) -> None:
        """Writes the line after this update (from 1). teacher: its mean part of the loss since the last line."""
        seconds = time.perf_counter() - self._last_time - self._paused
        steps, samples = step - self._last_step, position - self._last_position
        rate = samples / seconds
        if self._warm or step == self._line.total_steps:
            self._num_samples += samples
            self._seconds += seconds
        self._warm = step - self._first_step >= _WARM_STEPS
        seconds_left = (self._line.total_steps - step) * seconds / steps
        left = timedelta(seconds=round(seconds_left))
        spent = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        part = "" if teacher is None else f"teacher loss {teacher:.4f} | "
        words = f"{rate:.0f} {self._unit}/s, {rate / self._world.size:.0f} per rank | {part}{spent} | {left} left"
        since = Interval(self._loss_sum / steps, rate, words, seconds_left, loss_scale, self._unit, teacher)
        # Before the line, below which the bar is drawn again.
        self._on_bar(lambda bar: bar.set_postfix(loss=f"{since.mean_loss:.3g}"))
        _log.info(self._line.text(step, position, loss, lr, since))
        values = {"train/loss": loss, "train/lr": lr, "train/epoch": epoch, f"speed/{self._unit}_per_s": rate}
        if loss_scale is not None:
            values["train/loss_scale"] = loss_scale
        if teacher is not None:
            values["train/teacher_loss"] = teacher
        self.scalars(step, values | {f"time/{part}": share for part, share in shares.items()})
        self._restart(step, position)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._board.scalars(step, values)
        if self._wandb:
            self._wandb.scalars(step, values)

    def pause(self, seconds: float) -> None:
        """Excludes time of an evaluation or a checkpoint from the training speed."""
        self._paused += seconds

    def close(self) -> None:
        self._on_bar(lambda bar: bar.close())
        self._board.close()
        if self._wandb:
            self._wandb.close()

    def _on_bar(self, do: Callable[[Any], object]) -> None:
        if self._bar is not None:
            spare(_BAR, do, self._bar)

    def _restart(self, step: int, position: int) -> None:
        self._last_step, self._last_position = step, position
        self._last_time, self._paused, self._loss_sum = time.perf_counter(), 0.0, 0.0
