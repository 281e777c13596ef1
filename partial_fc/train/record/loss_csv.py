"""loss.csv: the loss of every update."""

import logging
import os
from io import FileIO
from pathlib import Path

from partial_fc.comm import World
from partial_fc.files import replacing
from partial_fc.train.record.log import warn_on_os_error

_log = logging.getLogger("partial_fc")


class LossCurve:
    """models_root/loss.csv: one row for each update (step, loss, lr), written by rank 0.

    A resumed run goes on where its checkpoint stands: rows of later steps are dropped. Rows that a full disk does not
    take wait in memory. (The other ranks write theirs to nowhere.)
    """

    HEADER = b"step,loss,lr\n"

    def __init__(self, models_root: Path, world: World, first_step: int):
        self._path = models_root / "loss.csv" if world.rank == 0 else Path(os.devnull)
        self._renew()
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

    def _renew(self) -> None:
        """A copy takes the place of the file: a rank 0 of a world before, which was cut off, may write to that one
        yet, over a network folder also when it is back. Where there is no room the file stays."""
        if self._path.exists() and str(self._path) != os.devnull:
            with warn_on_os_error(str(self._path)), replacing(self._path) as copy:
                copy.write_bytes(self._path.read_bytes())

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
