"""The curve of a run, loss.csv, history.jsonl and loss.png: writers and readers. Needs no torch."""

import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.accessories import import_matplotlib, spare
from partial_fc.checkpoint.files import finite
from partial_fc.files import check_regular, replacing

if TYPE_CHECKING:
    from partial_fc.comm import World

_REDRAW_EVERY_S = 30.0
_LOG_FROM = 20.0  # largest loss over smallest, above which the axis is logarithmic
_HANGS_S = 60.0  # a drawing takes less
AGAIN_S = 600.0  # after a file could not be written
_GOES_BACK = ("start", "back")
_log = logging.getLogger("partial_fc")


class Curve:
    """The writer of models_root/loss.csv and loss.png on rank 0; on other ranks it does nothing.

    loss.csv has a row for each update: step, loss, lr. A resumed run drops rows after its checkpoint's step. Rows wait
    in memory if the disk is full.

    loss.png is drawn in a thread from loss.csv and history.jsonl. A redraw costs 0.1 s of one core, 0.5 s after 600,000
    steps, and the first of a process 0.4 s more for matplotlib (docs/after-training.md).
    """

    HEADER = b"step,loss,lr\n"

    def __init__(self, models_root: Path, world: "World", first_step: int):
        self._root = models_root if world.rank == 0 else None
        self._path = models_root / "loss.csv" if world.rank == 0 else Path(os.devnull)
        self._renew()
        self._file = FileIO(self._path, "a")
        self._waiting = b""
        self._failed = False
        self._cut(first_step)
        self._drawing: threading.Thread | None = None
        self._drawn = time.monotonic()

    def add(self, step: int, loss: float, lr: float) -> None:
        self._waiting += b"%d,%.9g,%.9g\n" % (step, loss, lr)
        self._write()

    def rewind(self, step: int) -> None:
        """Drops rows after `step`."""
        spare(str(self._path), self._cut, step)

    def redraw(self, at_end: bool = False) -> None:
        """Starts to draw loss.png, every 30 s at most; waits for a drawing under way. at_end: in any case."""
        if self._root and (at_end or time.monotonic() >= self._drawn + _REDRAW_EVERY_S):
            self._drawn = time.monotonic()
            if not self._is_drawing(_HANGS_S if at_end else 0.0):
                picture = str(self._root / "loss.png")
                drawing = threading.Thread(target=spare, args=(picture, draw, self._root), name="loss.png", daemon=True)
                spare(f"{picture}, without a thread", drawing.start)
                self._drawing = drawing

    def _is_drawing(self, wait_s: float) -> bool:
        """Returns whether a drawing is still under way in wait_s: its disk or matplotlib may hang."""
        if self._drawing and self._drawing.is_alive():
            self._drawing.join(wait_s)
            return self._drawing.is_alive()
        return False

    def close(self) -> None:
        if self._is_drawing(_HANGS_S):
            _log.warning(f"loss.png is not drawn within {_HANGS_S:.0f} s: left out")
        self._write()
        if left := self._waiting.count(b"\n"):
            _log.warning(f"{self._path} lacks the last {left:,} rows")
        spare(str(self._path), self._file.close)

    def _renew(self) -> None:
        """Replaces the file by a copy: rank 0 of an earlier start, which was cut off, may still write to the old one
        over a network. Keeps the file if there is no room."""
        if self._path.exists() and str(self._path) != os.devnull:
            spare(str(self._path), self._copy)

    def _copy(self) -> None:
        with replacing(self._path) as copy:
            copy.write_bytes(self._path.read_bytes())

    def _cut(self, step: int) -> None:
        """Drops rows after `step` without writing any, so that a kill or a full disk loses none."""
        written = there = self._path.read_bytes()
        text = there + self._waiting
        if not text.startswith(self.HEADER):
            there, text = b"", self.HEADER
        kept = len(self.HEADER)
        for row in text[kept:].splitlines(keepends=True):
            number = row.partition(b",")[0]
            if not (row.endswith(b"\n") and number.isdigit() and int(number) <= step):
                break  # also if a crash or a full disk has cut it
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
                    f"{self._path} cannot be written ({error.strerror}); training continues; its rows wait in memory "
                    "until there is room"
                )
            self._failed = True
            return
        if self._failed:
            _log.info(f"{self._path} is written again, with the rows that have waited")
        self._failed = False


class HistoryFile:
    """The writer of models_root/history.jsonl: a row for each start, report, evaluation and end, by time.

        {"event": "start", "step": 0, "time": 1795390000.1, "world_size": 2, ...}
        {"step": 20, "time": ..., "train/loss": 21.5, "time/data": 0.01, ...}          as TensorBoard gets them
        {"event": "evaluation", "step": 2000, "time": ..., "scores": {"lfw": 0.9965}}

    If a run goes back (a checkpoint, a rollback), a row says so ("start", "back"): earlier rows of later steps no
    longer count. After a failed write, rows are skipped for some time.
    """

    def __init__(self, models_root: Path, world: "World"):
        self._path = models_root / "history.jsonl" if world.rank == 0 else Path(os.devnull)
        self._begin = ""

    def add(self, step: int, **values: Any) -> None:
        spare(str(self._path), self._append, {"step": step, "time": round(time.time(), 3), **values}, again_s=AGAIN_S)

    def _append(self, row: dict[str, Any]) -> None:
        begin, self._begin = self._begin, "\n"  # a partial row is a line of its own
        with self._path.open("a") as file:
            file.write(begin + json.dumps(finite(row), allow_nan=False) + "\n")
        self._begin = ""


# ---- reading


@dataclass
class History:
    """The valid rows of history.jsonl: not those of steps done again or rolled back. starts: all of them."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    scalars: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    num_backs: int = 0
    ended: str = ""  # "end", "stopped", or "": under way, or killed

    def series(self, name: str) -> list[tuple[int, float]]:
        """Returns (step, value) of a scalar, without NaN."""
        return [(row["step"], row[name]) for row in self.scalars if row.get(name) is not None]

    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """Returns (step, score) by evaluated set."""
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.evaluations:
            for name, score in row["scores"].items():
                if score is not None:
                    found.setdefault(name, []).append((row["step"], score))
        return found


def read_history(models_root: Path) -> History:
    """Reads history.jsonl; returns an empty History if there is none. Skips lines cut by a full disk or a crash."""
    found = History()
    path = models_root / "history.jsonl"
    if not path.exists():
        return found
    check_regular(path)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            step, event = int(row["step"]), row.get("event")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
        if event in _GOES_BACK:
            found.scalars = [one for one in found.scalars if one["step"] <= step]
            found.evaluations = [one for one in found.evaluations if one["step"] <= step]
            found.num_backs += event == "back"
        found.ended = event if event in ("end", "stopped") else ""
        if event == "start":
            found.starts.append(row)
        elif event == "evaluation" and isinstance(row.get("scores"), dict):
            found.evaluations.append(row)
        elif event is None:
            found.scalars.append(row)
    return found


def read_losses(models_root: Path) -> NDArray[np.float64]:
    """Reads loss.csv, (steps, 3): step, loss, learning rate. Skips incomplete rows."""
    path = models_root / "loss.csv"
    if not path.exists():
        return np.zeros((0, 3))
    check_regular(path)
    rows = path.read_bytes().splitlines()[1:]
    whole = [row for row in rows if row.count(b",") == 2 and not row.endswith(b",") and b"\0" not in row]
    if not whole:
        return np.zeros((0, 3))
    try:
        return np.loadtxt(whole, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; expected a step, a loss and a learning rate a line") from None


def thinned(row_N3: NDArray[np.float64], num_points: int = 300) -> NDArray[np.float64]:
    """Returns (points, 5): step, mean loss, smallest, largest, learning rate of num_points parts, without NaN."""
    row_N3 = row_N3[np.isfinite(row_N3[:, 1])]
    size = -(-len(row_N3) // num_points)
    parts = [row_N3[start : start + size] for start in range(0, len(row_N3), size or 1)]
    return np.array(
        [(p[-1, 0], p[:, 1].mean(), p[:, 1].min(), p[:, 1].max(), p[-1, 2]) for p in parts], dtype=np.float64
    ).reshape(-1, 5)


# ---- drawing


def draw(models_root: Path) -> None:
    """Writes loss.png: loss and learning rate, with marks for evaluations; nothing before the first step."""
    point_P5 = thinned(read_losses(models_root))
    if not len(point_P5):
        return
    step_P, loss_P, low_P, high_P, lr_P = point_P5.T
    figure = import_matplotlib().figure.Figure(figsize=(9, 6), dpi=100, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.fill_between(step_P, low_P, high_P, alpha=0.25, linewidth=0)
    above.plot(step_P, loss_P)
    if loss_P.min() > 0 and loss_P.max() > _LOG_FROM * loss_P.min():
        above.set(yscale="log", ylim=(max(low_P.min(), loss_P.min() / 10), None))
    above.set(ylabel="loss", title=models_root.resolve().name)
    below.plot(step_P, lr_P, color="tab:gray")
    below.set(xlabel="step", ylabel="learning rate")
    scores = read_history(models_root).scores()
    if scores:
        right = above.twinx()
        for number, (name, marks) in enumerate(scores.items(), start=1):
            label = f"{name} {100 * marks[-1][1]:.2f} %"
            steps, percent = [step for step, _ in marks], [100 * score for _, score in marks]
            right.plot(steps, percent, "o-", markersize=4, linewidth=0.8, color=f"C{number}", label=label)
        every = [100 * score for marks in scores.values() for _, score in marks]
        room = max(5.0, 0.2 * (max(every) - min(every)))  # ignores variations of a tenth
        right.set(ylabel="score, %", ylim=(min(every) - room, max(every) + room))
        figure.legend(loc="outside lower center", ncols=4, fontsize="small")  # inside it would cover marks
    for axes in (above, below):
        axes.grid(color="0.9")
    with replacing(models_root / "loss.png") as partial:
        figure.savefig(partial, format="png")
