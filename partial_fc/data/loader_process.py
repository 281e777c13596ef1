"""Batches from a process beside the training: Python's lock there does not hold up the thread here that launches
kernels (docs/data.md has what that costs).

The process is spawned, not forked, and never touches a GPU. Tasks and labels travel through a pipe; pixels lie in slots
of one shared buffer, which is made once and has no name and no place in /dev/shm. Batch n lies in slot n modulo their
number, so nobody has to give a slot back. The process ends when its pipe does, however this one ends.
"""

import logging
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc.accessories import threads
from partial_fc.data.build import Builder, Built
from partial_fc.data.order import Selection
from partial_fc.memory import available_memory_bytes

_WAIT_S = 5.0  # for a process that has been told to end
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # the training decides


class _Buffer:
    """The slots of a shared file, each large enough for a batch; made when the first array is known."""

    def __init__(self, file: int, batch_size: int, num_slots: int) -> None:
        self._file, self._batch_size, self._num_slots = file, batch_size, num_slots
        self._lock = threading.Lock()
        self.memory: NDArray[np.uint8] | None = None
        self._slot_bytes = 0

    def view(self, slot: int, num: int, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        """Returns the memory of a batch of num <= batch_size arrays. Raises ValueError where there is none."""
        with self._lock:
            if self.memory is None:
                size = self._batch_size * math.prod(shape) * dtype.itemsize
                self._slot_bytes = size + -size % mmap.PAGESIZE
                size = self._num_slots * self._slot_bytes
                if not os.fstat(self._file).st_size:
                    # What is mapped is taken at its first use: too late for an error.
                    if size > (free := available_memory_bytes()):
                        raise ValueError(
                            f"the loader needs {size / 1e6:,.0f} MB for {self._num_slots} batches of "
                            f"{self._batch_size} samples of {dtype} {shape}, and {free / 1e6:,.0f} MB are free here; "
                            "give fewer --num-workers or a smaller --batch-size"
                        )
                    os.ftruncate(self._file, size)
                self.memory = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        at = slot * self._slot_bytes
        return self.memory[at : at + num * math.prod(shape) * dtype.itemsize].view(dtype).reshape(num, *shape)


class LoaderProcess:
    """Builds batches in a process of its own, some ahead, in any order."""

    def __init__(self, builder: Builder, batch_size: int, num_slots: int, num_threads: int, pin_memory: bool) -> None:
        """Raises ValueError for a source or transform that pickle does not take."""
        try:
            given = pickle.dumps((builder, len(builder.source), batch_size, num_slots, num_threads))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(
                f"--loader process: {error}. What reads and transforms a sample goes to another process by pickle: a "
                "function or class of a module, not one within a function; or give --loader threads"
            ) from error
        self._builder, self._num_slots, self._pin = builder, num_slots, pin_memory
        self._count = 0  # of the batches that were asked for
        self._done: dict[int, tuple[Any, ...]] = {}
        here, there = socket.socketpair()
        self._file = os.memfd_create("partial-fc batches")
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with there:
            ends = there.fileno(), self._file
            command = [sys.executable, "-P", "-m", __name__, *map(str, ends)]
            self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, env=environment)
        self._pipe = Connection(here.detach())
        self._buffer = _Buffer(self._file, batch_size, num_slots)
        self._pinned = 0
        self._send_bytes(given)

    def submit(self, selection: Selection) -> "Pending":
        number, self._count = self._count, self._count + 1
        task = (number, selection.position_B.numpy(), selection.index_B.numpy(), self._builder.has_started)
        self._send_bytes(pickle.dumps(task))
        return Pending(self, number)

    def wait(self, number: int) -> Built:
        """Waits for a batch. Raises what the builder has raised there, and ValueError if the process is gone."""
        while number not in self._done:
            try:
                kind, *content = self._pipe.recv()
            except (EOFError, OSError):
                raise self._ended() from None
            if kind == "log":
                name, level, text = content
                logging.getLogger(name).log(level, "%s", text)
            elif kind == "failed":
                raise ValueError(f"rank {self._builder.rank}: {content[0]}")
            else:
                self._done[content[0]] = (kind, *content[1:])
        kind, *content = self._done.pop(number)
        if kind == "error":
            raise content[0]
        array, rest = content
        data_B = self._buffer.view(number % self._num_slots, *array)
        if self._pin and not self._pinned:
            memory = self._buffer.memory
            assert memory is not None
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)))
            self._pinned = memory.ctypes.data
        return Built(data_B, *rest)

    def close(self) -> None:
        if self._pinned:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._pinned)))
            self._pinned = 0
        if not self._pipe.closed:
            self._pipe.close()
            os.close(self._file)
            try:
                self._process.wait(_WAIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _send_bytes(self, content: bytes) -> None:
        try:
            self._pipe.send_bytes(content)
        except OSError:
            raise self._ended() from None

    def _ended(self) -> ValueError:
        with suppress(EOFError, OSError):  # it may have said why before it ended
            while True:
                if (said := self._pipe.recv())[0] == "failed":
                    return ValueError(f"rank {self._builder.rank}: {said[1]}")
        try:
            status = self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            status = 0
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            how += ", as the system does where memory is short (`dmesg`)" if -status == signal.SIGKILL else ""
        return ValueError(
            f"rank {self._builder.rank}: process {self._process.pid}, which reads the data, {how}. Start the same "
            "command again: it goes on from the last checkpoint"
        )


class Pending:
    def __init__(self, process: LoaderProcess, number: int) -> None:
        self._process, self._number = process, number

    def result(self) -> Built:
        return self._process.wait(self._number)

    def cancel(self) -> None:
        """Waits for it, since until then its slot is written."""
        with suppress(ValueError, OSError, RuntimeError):  # of a batch that nobody wants
            self.result()


# ---- there


class _ToTraining(logging.Handler):
    """Hands the log's lines to the training, which has the files."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def emit(self, record: logging.LogRecord) -> None:
        self._answer("log", record.name, record.levelno, record.getMessage())


def serve(pipe: Connection, file: int) -> None:
    """Builds the batches that are asked for, until the pipe ends."""
    lock = threading.Lock()

    def answer(*content: Any) -> None:
        message = pickle.dumps(content)
        with lock:
            pipe.send_bytes(message)

    try:
        builder, num_samples, batch_size, num_slots, num_threads = pickle.loads(pipe.recv_bytes())
        if (there := len(builder.source)) != num_samples:
            raise ValueError(f"{there:,} samples, where the training has {num_samples:,}: the set has changed")
    except Exception as error:  # of any module that is imported here
        answer("failed", f"the process that reads the data cannot begin: {type(error).__name__}: {error}")
        return
    logging.getLogger().addHandler(_ToTraining(answer))
    buffer, here = _Buffer(file, batch_size, num_slots), threading.local()
    builder.room = lambda num, shape, dtype: buffer.view(here.slot, num, shape, dtype)

    def build(number: int, position_B: NDArray[np.int64], index_B: NDArray[np.int64]) -> None:
        here.slot = number % num_slots
        try:
            data_B, *rest = builder.build(position_B, index_B)
            answer("built", number, (len(data_B), data_B.shape[1:], data_B.dtype), rest)
        except Exception as error:
            answer("error", number, _portable(error))

    pool = threads(num_threads, "loader")
    while True:
        number, position_B, index_B, builder.has_started = pickle.loads(pipe.recv_bytes())
        pool.submit(build, number, position_B, index_B)


def _portable(error: Exception) -> Exception:
    """Returns the error, or what it says if pickle cannot bring it over."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # of any library's class
        return ValueError(f"{type(error).__name__}: {error}")


def main() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    pipe, file = Connection(int(sys.argv[1])), int(sys.argv[2])
    try:
        serve(pipe, file)
    except (EOFError, OSError):  # the training has ended, or has closed the loader
        os._exit(0)  # without waiting for its threads, which only read


if __name__ == "__main__":
    main()
