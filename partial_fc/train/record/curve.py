"""The curve of a run, loss.csv: its writer, its reader, and the reader of TensorBoard's files. Needs no torch."""

import logging
import math
import os
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partial_fc.accessories import spare
from partial_fc.files import check_regular, replacing

if TYPE_CHECKING:
    from partial_fc.comm import World

_log = logging.getLogger("partial_fc")


class Curve:
    """The writer of models_root/loss.csv on rank 0: a row for each update. A resumed run drops rows after its
    checkpoint's step. Rows wait in memory if the disk is full."""

    HEADER = b"step,loss,lr\n"

    def __init__(self, models_root: Path, world: "World", first_step: int):
        self._path = models_root / "loss.csv" if world.rank == 0 else Path(os.devnull)
        if self._path.exists() and str(self._path) != os.devnull:
            # If there is room: a rank 0 that was cut off may still write to the old file.
            spare(str(self._path), self._replace_by_copy)
        self._file = FileIO(self._path, "a")
        self._waiting = b""
        self._failed = False
        self._cut(first_step)

    def add(self, step: int, loss: float, lr: float) -> None:
        self._waiting += b"%d,%.9g,%.9g\n" % (step, loss, lr)
        self._write()

    def rewind(self, step: int) -> None:
        """Drops rows after `step`."""
        spare(str(self._path), self._cut, step)

    def close(self) -> None:
        self._write()
        if left := self._waiting.count(b"\n"):
            _log.warning(f"{self._path} lacks the last {left:,} rows")
        spare(str(self._path), self._file.close)

    def _replace_by_copy(self) -> None:
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


# ---- reading


def read_scalars(models_root: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns (step, value), float32, by name, from TensorBoard's files: without NaN, and the last of steps that were
    done again. {} without any."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((models_root / "tensorboard").glob("events.out.tfevents.*")):
        check_regular(path)
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                rows = found.setdefault(value.tag, [])
                while rows and rows[-1][0] >= event.step:
                    rows.pop()
                if value.HasField("simple_value") and math.isfinite(value.simple_value):
                    rows.append((event.step, value.simple_value))
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
    """Returns (points, 3): step, mean loss, learning rate of num_points parts, without NaN."""
    row_N3 = row_N3[np.isfinite(row_N3[:, 1])]
    size = -(-len(row_N3) // num_points)
    parts = [row_N3[start : start + size] for start in range(0, len(row_N3), size or 1)]
    return np.array([(p[-1, 0], p[:, 1].mean(), p[-1, 2]) for p in parts], dtype=np.float64).reshape(-1, 3)
