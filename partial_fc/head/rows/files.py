"""Rows in memory-mapped sparse files: more of them than fit into memory, of which the system keeps the used ones there.

path/rows-<first row>/              one folder for the rows of one rank; no two processes use it at a time (a lock)
    centres.bin, momentum.bin, ...  row after row, as stored; a row never created is a hole and takes no space

The files are the working memory of one run, and its checkpoints are the truth: whoever opens the folder next starts
from empty files, whatever lies there, and takes rows from a checkpoint. So a run may be killed at any moment, and what
it leaves may be deleted. (Rows are written back in no order: files of a killed run mix steps.)
"""

import errno
import fcntl
import mmap
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from partial_fc.accessories import threads

_PAGE = mmap.PAGESIZE


class RowFiles:
    """tables: name -> (num_rows, width) tensors that are the files; rows must be created by `write` before they are
    written to: a hole that a full disk cannot fill would kill the process (SIGBUS), where `write` raises OSError."""

    def __init__(self, folder: Path, num_rows: int, columns: dict[str, tuple[int, torch.dtype]]):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(
                f"{folder} is in use (by another process, or by centres of this one that were not closed); "
                "give each run a folder of its own for its centres"
            ) from None
        for old in folder.glob("*.bin"):
            old.unlink()
        self.tables: dict[str, Tensor] = {}
        self._files: dict[str, int] = {}
        for name, (width, dtype) in columns.items():
            self._files[name] = os.open(folder / f"{name}.bin", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(self._files[name], num_rows * width * dtype.itemsize)
            pages = mmap.mmap(self._files[name], 0)
            self.tables[name] = torch.frombuffer(pages, dtype=dtype).view(num_rows, width)
        self._worker = threads(1, "read-ahead")
        self._reading: Future[None] | None = None

    def write(self, row_M: Tensor, rows: dict[str, Tensor]) -> None:
        """Writes rows (ascending numbers) into all tables, zeros where `rows` lacks one. Takes disk space now, and
        raises OSError (ENOSPC) if there is none."""
        if not len(row_M):
            return
        num_bytes = len(row_M) * sum(t.shape[1] * t.element_size() for t in self.tables.values())
        if num_bytes > shutil.disk_usage(self.folder).free:
            raise self._full(len(row_M), num_bytes)
        numbers = row_M.numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)  # of runs of neighbours
        stops = np.append(starts[1:], len(numbers))
        for name, table in self.tables.items():
            row_bytes = table.shape[1] * table.element_size()
            values = rows[name].contiguous() if name in rows else table.new_zeros(len(row_M), table.shape[1])
            data = values.view(torch.uint8).numpy().data.cast("B")
            try:
                for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                    offset = int(numbers[start]) * row_bytes
                    _write_all(self._files[name], data[start * row_bytes : stop * row_bytes], offset)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise self._full(len(row_M), num_bytes) from error

    def read_ahead(self, row_M: Tensor) -> None:
        """Asks the system, from a thread, to bring these rows (ascending numbers) into memory."""
        idle = self._reading is None or self._reading.done()  # else the disk is behind, and more would not help
        if idle and len(row_M):
            self._reading = self._worker.submit(self._read_ahead, row_M.numpy())

    def _read_ahead(self, row_M: np.ndarray) -> None:
        for name, table in self.tables.items():
            row_bytes = table.shape[1] * table.element_size()
            first, stop = row_M * row_bytes // _PAGE, ((row_M + 1) * row_bytes - 1) // _PAGE + 1
            apart = np.flatnonzero(first[1:] > stop[:-1])  # where a run of pages ends
            begins, ends = first[np.append(0, apart + 1)].tolist(), stop[np.append(apart, -1)].tolist()
            for begin, end in zip(begins, ends, strict=True):
                size = (end - begin) * _PAGE
                os.posix_fadvise(self._files[name], begin * _PAGE, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Closes the files; the tables cannot be used afterwards."""
        self._worker.shutdown(cancel_futures=True)
        for file in (*self._files.values(), self._lock):
            os.close(file)
        self.tables, self._files = {}, {}

    def _full(self, num_rows: int, num_bytes: int) -> OSError:
        free = shutil.disk_usage(self.folder).free
        return OSError(
            errno.ENOSPC,
            f"no space for {num_rows} more rows of centres and their state: {num_bytes} bytes needed, {free} free; "
            "free some, choose a smaller dtype or optimizer state, or resume from the last checkpoint on a larger disk",
            str(self.folder),
        )


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
