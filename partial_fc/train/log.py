"""What a run says: lines for people, scalars for TensorBoard, a file for each rank."""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from partial_fc.comm import World
from partial_fc.head.telemetry import Histogram

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_TRY_AGAIN_S = 600.0  # after a file of TensorBoard could not be written
_log = logging.getLogger("partial_fc")


def open_files(models_root: Path, world: World, bare: bool = False, hist: str | None = None) -> logging.Logger:
    """Every rank logs to models_root/logs/rank-R.log, rank 0 to the terminal too; warnings of all ranks show there.
    bare: lines on the terminal have nothing before them, and come from one rank of every host. hist: format of the
    lines in models_root/R_hist.log, a second file of every rank, and on the terminal; {rank} in it is R."""
    folder = models_root / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    for old in _log.handlers[:]:
        _log.removeHandler(old)
        with contextlib.suppress(OSError):  # what a full disk did not take
            old.close()
    line = f"%(asctime)s rank {world.rank} %(levelname).1s %(message)s"
    formatter = logging.Formatter(line, "%Y-%m-%d %H:%M:%S")
    on_terminal = logging.Formatter("%(message)s") if bare else formatter
    to_file = logging.FileHandler(folder / f"rank-{world.rank:04d}.log")
    speaks = (world.local_rank if bare else world.rank) == 0
    to_terminal = _AboveBar(logging.INFO if speaks else logging.WARNING)
    to_file.setFormatter(formatter)
    if hist:
        on_terminal = logging.Formatter(hist.format(rank=world.rank))
        to_hist = logging.FileHandler(models_root / f"{world.rank}_hist.log")
        to_hist.setFormatter(on_terminal)
        _log.addHandler(to_hist)
    to_terminal.setFormatter(on_terminal)
    _log.addHandler(to_file)
    _log.addHandler(to_terminal)
    return _log


class _AboveBar(logging.Handler):
    """Prints without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # One write: launchers put the rank before each piece they read.
            tqdm.write(self.format(record) + "\n", file=sys.stdout, end="")
            sys.stdout.flush()
        except OSError:
            self.handleError(record)


@contextmanager
def warn_on_os_error(what: str) -> Iterator[None]:
    """Around the writing of what a run can do without: what the disk has against it is said, and ends no training."""
    try:
        yield
    except OSError as error:
        _log.warning(f"{what} cannot be written ({error.strerror or error}); that alone ends no run")


class LossCurve:
    """models_root/loss.csv: one row for each update (step, loss, lr), written by rank 0.

    A resumed run goes on where its checkpoint stands: rows of later steps are dropped. Rows that a full disk does not
    take wait in memory. (The other ranks write theirs to nowhere.)
    """

    HEADER = b"step,loss,lr\n"

    def __init__(self, models_root: Path, world: World, first_step: int):
        self._path = models_root / "loss.csv" if world.rank == 0 else Path(os.devnull)
        self._file = FileIO(self._path, "a")
        self._waiting = b""
        self._failed = False
        self._cut(first_step)

    def add(self, step: int, loss: float, lr: float) -> None:
        self._waiting += b"%d,%.9g,%.9g\n" % (step, loss, lr)
        self._write()

    def rewind(self, step: int) -> None:
        """This step is the last one that is done."""
        with warn_on_os_error(str(self._path)):
            self._cut(step)

    def close(self) -> None:
        self._write()
        if left := self._waiting.count(b"\n"):
            _log.warning(f"{self._path} lacks the last {left:,} rows")
        with warn_on_os_error(str(self._path)):
            self._file.close()

    def _cut(self, step: int) -> None:
        """Drops rows after `step` without writing any: a run that is killed here, or has a full disk, loses none."""
        written = there = self._path.read_bytes()
        text = there + self._waiting
        if not text.startswith(self.HEADER):
            there, text = b"", self.HEADER
        kept = len(self.HEADER)
        for row in text[kept:].splitlines(keepends=True):
            number = row.partition(b",")[0]
            if not (row.endswith(b"\n") and number.isdigit() and int(number) <= step):
                break  # also where a lost machine or a full disk has cut it
            kept += len(row)
        in_file = min(kept, len(there))
        if in_file < len(written):
            self._file.truncate(in_file)
        self._waiting = text[len(there) : kept]
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._failed:
                _log.warning(
                    f"{self._path} cannot be written ({error.strerror}); training goes on, and its rows wait in memory "
                    "until there is room"
                )
            self._failed = True
            return
        if self._failed:
            _log.info(f"{self._path} is written again, with the rows that have waited")
        self._failed = False


class _Board:
    """TensorBoard's files, of rank 0. Where one cannot be written, another is begun some time later; what comes in
    between, and the last minutes before, is left out."""

    def __init__(self, folder: Path, world: World):
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._next_try = 0.0 if world.rank == 0 else math.inf

    def write(self, add: "Callable[[SummaryWriter], None]") -> None:
        if self._writer is None and time.monotonic() < self._next_try:
            return
        writer, self._writer = self._writer, None
        self._next_try = time.monotonic() + _TRY_AGAIN_S
        from torch.utils.tensorboard import SummaryWriter  # here: one rank of many needs it, and it takes its time

        with warn_on_os_error(f"TensorBoard's file below {self._folder}"):
            writer = writer or SummaryWriter(str(self._folder))
            add(writer)
            self._writer = writer

    def close(self) -> None:
        if self._writer:
            with warn_on_os_error(f"TensorBoard's file below {self._folder}"):
                self._writer.close()


@dataclass(frozen=True)
class Interval:
    """What the steps since the line before it were like. words: rates, shares of the time, time that is left."""

    mean_loss: float
    images_per_s: float  # of all ranks
    images_per_s_per_rank: float
    words: str


@dataclass(frozen=True)
class StepLine:
    """The line that the log gets every `frequent` steps and after the last, with loss, rate, speed and the time that is
    left. A recipe may have another."""

    frequent: int
    total_steps: int
    num_samples: int  # of an epoch

    def due(self, step: int, position: int) -> bool:
        """Whether there is one after this step, which ended at this position in the data."""
        return step % self.frequent == 0 or step == self.total_steps

    def text(self, step: int, position: int, loss: float, lr: float, since: Interval) -> str:
        epoch = position / self.num_samples
        return f"step {step}/{self.total_steps} epoch {epoch:.2f} loss {loss:.4f} lr {lr:.4g} | {since.words}"


class Progress:
    """The lines of a run, with rates since the line before; TensorBoard and a bar on rank 0."""

    def __init__(self, models_root: Path, world: World, line: StepLine, step: int, position: int):
        """step, position: where the run begins."""
        self._world = world
        self._line = line
        self._board = _Board(models_root / "tensorboard", world)
        watched = world.rank == 0 and sys.stderr.isatty()
        self._bar = tqdm(total=line.total_steps, initial=step, unit="step", disable=not watched)
        self._warm = False  # the first interval holds the warming up of caches and threads
        self._num_images = 0
        self._seconds = 0.0
        self._restart(step, position)

    @property
    def images_per_s(self) -> float:
        """The rate of all ranks, over all reported intervals but the first."""
        return self._num_images / self._seconds if self._seconds else 0.0

    def advance(self, loss: float) -> None:
        """Moves the bar: one step is done."""
        self._bar.update()
        self._loss_sum += loss

    def rewind(self, step: int, position: int) -> None:
        """Goes back: this step is the last one that is done."""
        self._bar.n = step
        self._bar.refresh()
        self._restart(step, position)

    def report(self, step: int, position: int, epoch: float, loss: float, lr: float, shares: dict[str, float]) -> None:
        """Writes the line after update number `step` (counted from 1)."""
        seconds = time.perf_counter() - self._last_time - self._paused
        steps, images = step - self._last_step, position - self._last_position
        rate = images / seconds
        if self._warm or step == self._line.total_steps:
            self._num_images += images
            self._seconds += seconds
        self._warm = True
        left = timedelta(seconds=round((self._line.total_steps - step) * seconds / steps))
        spent = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        per_rank = rate / self._world.size
        words = f"{rate:.0f} images/s, {per_rank:.0f} per rank | {spent} | {left} left"
        since = Interval(self._loss_sum / steps, rate, per_rank, words)
        _log.info(self._line.text(step, position, loss, lr, since))
        self.scalars(step, {"train/loss": loss, "train/lr": lr, "train/epoch": epoch, "speed/images_per_s": rate})
        self.scalars(step, {f"time/{part}": share for part, share in shares.items()})
        self._bar.set_postfix(loss=f"{loss:.3f}", lr=f"{lr:.3g}", images_per_s=f"{rate:.0f}")
        self._restart(step, position)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        def add(board: "SummaryWriter") -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)

        self._board.write(add)

    def histograms(self, step: int, values: dict[str, Histogram]) -> None:
        """Empty ones are left out."""

        def add(board: "SummaryWriter") -> None:
            for name, found in values.items():
                if found.count:
                    board.add_histogram_raw(
                        name,
                        min=found.smallest,
                        max=found.largest,
                        num=found.count,
                        sum=found.total,
                        sum_squares=found.square_total,
                        bucket_limits=found.edges[1:].tolist(),
                        bucket_counts=found.counts.tolist(),
                        global_step=step,
                    )

        self._board.write(add)

    def pause(self, seconds: float) -> None:
        """Time that went into evaluation or a checkpoint: no part of the training speed."""
        self._paused += seconds

    def close(self) -> None:
        self._bar.close()
        self._board.close()

    def _restart(self, step: int, position: int) -> None:
        self._last_step, self._last_position = step, position
        self._last_time, self._paused, self._loss_sum = time.perf_counter(), 0.0, 0.0
