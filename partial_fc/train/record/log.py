"""The log of a run: lines for people on the terminal, and in a file of each rank. (Numbers: record/.)"""

import contextlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from partial_fc import terminal
from partial_fc.comm import World, started_here
from partial_fc.printable import Formatter

_log = logging.getLogger("partial_fc")


class Line(str):
    """A line of the files; on_terminal: its shorter form on the terminal; "": none."""

    on_terminal: str

    def __new__(cls, text: str, on_terminal: str) -> Self:
        line = super().__new__(cls, text)
        line.on_terminal = on_terminal
        return line


SecondFile = tuple[str, str]
"""The name, below models_root, and the format of another file with rank 0's lines, as another program writes it."""


def open_files(models_root: Path, world: World, bare: bool = False, hist: SecondFile | None = None) -> logging.Logger:
    """Opens models_root/logs/rank-R.log on every rank. Lines of rank 0 show on the terminal, too, without prefix, as do
    those of a rank of every host whose command was typed there (--nodes, --num-shards). Warnings of all ranks show.
    bare: the terminal's lines come from one rank of every host, and warnings look like all others."""
    folder = models_root / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    for old in _log.handlers[:]:
        _log.removeHandler(old)
        with contextlib.suppress(OSError):  # lines that a full disk refused
            old.close()
    line = f"%(asctime)s rank {world.rank} %(levelname).1s %(message)s"
    formatter = Formatter(line, "%Y-%m-%d %H:%M:%S")
    to_file = LogFile(folder / f"rank-{world.rank:04d}.log")
    speaks = (world.local_rank if bare or started_here() else world.rank) == 0
    to_terminal = _AboveBar(logging.INFO if speaks else logging.WARNING)
    to_file.setFormatter(formatter)
    to_terminal.setFormatter(Formatter("%(message)s") if bare else _ForPeople(world.rank))
    if hist and world.rank == 0:
        to_hist = LogFile(models_root / hist[0])
        to_hist.setFormatter(Formatter(hist[1]))
        _log.addHandler(to_hist)
    _log.addHandler(to_file)
    _log.addHandler(to_terminal)
    return _log


class LogFile(logging.FileHandler):
    """A log file. If a full disk refuses lines, one line on the terminal says so."""

    _has_said = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._has_said:
            terminal.say(f"warning: {self.baseFilename} may lose lines: {sys.exc_info()[1]}")
        self._has_said = True


class _ForPeople(Formatter):
    """A formatter for the terminal: rank and level only if they matter, and no time; the files have all three."""

    def __init__(self, rank: int):
        super().__init__()
        self._who = f"rank {rank}: " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        how_bad = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._who}{how_bad}{super().format(record)}"


class _AboveBar(logging.Handler):
    """A handler that prints above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, Line):
            if not record.msg.on_terminal:
                return
            record = logging.makeLogRecord({**record.__dict__, "msg": record.msg.on_terminal})
        try:
            terminal.say(self.format(record))
        except OSError:
            self.handleError(record)


@dataclass(frozen=True)
class Interval:
    """The steps since the last line. words: rates, shares of the time, time left."""

    mean_loss: float
    samples_per_s: float  # of all ranks
    words: str
    seconds_left: float = 0.0
    loss_scale: float | None = None  # now; None: no loss scale
    unit: str = "images"  # the noun for samples
    teacher_loss: float | None = None  # its part of mean_loss; None: no teacher


@dataclass(frozen=True)
class StepLine:
    """The log's line every `frequent` steps and after the last: loss, rate, speed, time left. Recipes may differ."""

    frequent: int
    total_steps: int
    num_samples: int  # of an epoch

    # Early updates of this process with a line as well, so that progress shows within seconds.
    early: ClassVar[tuple[int, ...]] = (1, 2, 5, 10)

    def due(self, step: int, position: int) -> bool:
        """Returns whether a line is due after this step, which ended at this position in the data."""
        return step % self.frequent == 0 or step == self.total_steps

    def text(self, step: int, position: int, loss: float, lr: float, since: Interval) -> str:
        epoch = position / self.num_samples
        text = f"step {step}/{self.total_steps} epoch {epoch:.2f} loss {loss:.4f} lr {lr:.4g} | {since.words}"
        return Line(text, self.short(step, since))

    def short(self, step: int, since: Interval) -> str:
        """Returns the line for the terminal: at most 80 columns, each fact once."""
        unit = "img" if since.unit == "images" else since.unit
        speed = f"{since.samples_per_s:.{0 if since.samples_per_s >= 10 else 1}f} {unit}/s"
        minutes, seconds = divmod(round(since.seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        part = "" if since.teacher_loss is None else f" (teacher {since.teacher_loss:.3g})"
        return f"step {step}/{self.total_steps} · loss {since.mean_loss:.3g}{part} · {speed} · {left} left"
