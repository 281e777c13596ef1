"""The writer of checkpoints in the background.

A checkpoint takes two jobs, each done by all ranks in background threads during training:

    writing   every rank writes its files, with checksums, and has them on the disk
    marking   one rank of each folder writes COMPLETE there; older checkpoints may go once all have

The threads do not communicate with other ranks. The training thread, which exchanges the state of the jobs, tells the
saver when all ranks have done a job, and if it failed on any. So if ranks have folders of their own, a checkpoint is
either complete in all of them or older ones still exist.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from partial_fc.accessories import threads
from partial_fc.checkpoint.folders import add_to_marker, folder_name, mark, newest, prune, unmark
from partial_fc.checkpoint.lock import Fence, LostLock
from partial_fc.checkpoint.snapshot import REMEDY, Snapshot
from partial_fc.comm import World, all_or_raise
from partial_fc.errors import describe
from partial_fc.files import make_folders
from partial_fc.memory import available_memory_bytes, refusals

_log = logging.getLogger("partial_fc")
_COPY_SHARE = 0.5  # of the memory that is free now


class Saver:
    """Writes the checkpoints of one run below `root`. All ranks call its methods at the same steps.

        saver.begin(snapshot)                       # training continues
        saver.poll(any_busy, any_failed)          # after every step, with what all ranks say of busy and failed
        saver.finish()                              # waits; a collective

    If a checkpoint cannot be written, the rank logs it and removes its files; earlier checkpoints stay.
    """

    def __init__(self, root: Path, world: World, keep: int, keep_best: bool = True, lock: Fence | None = None):
        """lock: the run's record in root, read again before anything there is marked, written or removed. Raises
        ValueError, on all ranks, if one of them cannot write below root. A collective."""
        self.root = root
        self._lock, self._check = lock, lock.check if lock else lambda: None
        self._world = world
        self._keep, self._keep_best = keep, keep_best
        self._beside = ranks_beside(root, world)
        self._leads = world.rank == self._beside[0]
        self._thread = threads(1, "checkpoint")
        self._job: Future[tuple[int, float]] | None = None
        self._marking = False
        self._folder = root  # of the checkpoint under way
        self._step = 0
        self._began = self._pause_s = 0.0
        self._warned_of_memory = False
        self.last_failed = False  # whether the last checkpoint could not be written, on any rank
        self._lost: LostLock | None = None

    @property
    def under_way(self) -> bool:
        """Returns whether a checkpoint is begun and neither complete nor aborted; equal on all ranks."""
        return self._job is not None

    @property
    def busy(self) -> bool:
        """Returns whether this rank's job is running."""
        return self._job is not None and not self._job.done()

    @property
    def failed(self) -> bool:
        """Returns whether this rank's job failed."""
        return self._job is not None and self._job.done() and self._job.exception() is not None

    @property
    def lost(self) -> LostLock | None:
        """Returns why this rank may not write below root any more."""
        return self._lost or (self._lock.lost if self._lock else None)

    def any_lost(self) -> bool:
        """Returns whether any rank has lost the lock. A collective."""
        return self._any(self.lost is not None, "checkpoint/lost")

    def can_copy(self, num_bytes: int) -> bool:
        """Returns whether num_bytes more of each rank fit into memory during training, for a background write."""
        available = available_memory_bytes()
        fits = num_bytes * self._world.local_size < _COPY_SHARE * available
        if not fits and not self._warned_of_memory:
            self._warned_of_memory = True
            _log.warning(
                f"training pauses while checkpoints are written: a copy of {num_bytes / 1e6:,.1f} MB, by each of "
                f"this host's {self._world.local_size} processes, would take more than {_COPY_SHARE:.0%} of the "
                f"{available / 1e6:,.1f} MB that are free. {REMEDY}"
            )
        return fits

    def begin(self, snapshot: Snapshot, since: float | None = None) -> None:
        """Starts to write; a snapshot that is no copy is written before this returns. since: when (perf_counter) it
        interrupted training. Aborts if the marker of an earlier try at this step cannot be removed. A collective."""
        if self._begin(snapshot.step, since, None):
            self._job = self._thread.submit(self._write, snapshot)
            if not snapshot.is_copy:
                self._wait()
            self._pause_s = time.perf_counter() - self._began

    def abort(self, step: int, error: MemoryError | OSError) -> None:
        """Takes the place of `begin` on a rank without memory for a snapshot: all ranks abort. A collective."""
        self._begin(step, None, error)

    def _begin(self, step: int, since: float | None, problem: Exception | None) -> bool:
        assert not self.under_way, "finish() comes first"
        self._step, self._folder = step, self.root / folder_name(step)
        self._marking, self.last_failed = False, False
        self._began = time.perf_counter() if since is None else since
        problem = self._make_root() or self._unmark() or problem
        # A complete folder is never written into.
        if not self._any(problem is not None, "checkpoint/begin"):
            return True
        self._give_up(problem)
        return False

    def poll(self, any_busy: bool, any_failed: bool) -> None:
        """Advances the checkpoint. any_busy, any_failed: whether `busy` and `failed` hold on any rank, equal on all."""
        if self._job is None or any_busy:
            return
        error = self._job.exception()
        if any_failed:
            self._give_up(error)
        elif self._marking:
            self._job = None
            if self._leads:
                self._thread.submit(_prune, self.root, self._keep, self._keep_best, self._check, self._step)
        else:
            num_bytes, seconds = self._job.result()
            _log.info(
                f"checkpoint {self._folder.name}: {num_bytes / 1e6:.1f} MB of this rank; training paused for "
                f"{self._pause_s:.3f} s, on the disk after {seconds:.2f} s"
            )
            self._marking = True
            self._job = self._thread.submit(self._mark)

    def finish(self) -> None:
        """Returns when the checkpoint under way is complete or aborted. A collective."""
        while self.under_way:
            self._wait()
            self.poll(False, self._any(self.failed, "checkpoint/failed"))

    def add_score(self, step: int, facts: Mapping[str, Any]) -> None:
        """Adds score, best and best_score to the marker of this step's checkpoint, if it is complete; in the thread."""
        if self._leads:
            self._thread.submit(self._add_score, step, dict(facts))

    def drain(self) -> None:
        """Runs `finish`, and waits for the removal of older checkpoints. A collective."""
        self.finish()
        self._thread.submit(int).result()

    def close(self) -> None:
        """Waits for the thread; a checkpoint under way stays without its marker."""
        self._thread.shutdown()

    def _wait(self) -> None:
        if self._job is not None:
            self._job.exception()

    def _any(self, here: bool, name: str) -> bool:
        """Returns whether `here` is true on any rank. A collective."""
        return bool(self._world.all_reduce(torch.tensor([float(here)]), "max", name=name).item())

    def _unmark(self) -> OSError | LostLock | None:
        """Removes the marker of an earlier try at this step. Returns the disk's error, which does not end training."""
        try:
            if self._leads:
                self._check()
                unmark(self._folder)
        except (OSError, LostLock) as error:
            return error
        return None

    def _make_root(self) -> OSError | None:
        """Creates the root, which somebody may have removed to make room."""
        try:
            if not self.root.exists():
                make_folders(self.root)
                _log.warning(
                    f"{self.root} was removed or moved during the run, and is created again: checkpoints and results "
                    "are written here; log and loss.csv go on in the folder that was moved"
                )
        except OSError as error:
            return error
        return None

    # ---- in the thread

    def _write(self, snapshot: Snapshot) -> tuple[int, float]:
        with refusals():
            num_bytes = snapshot.write(self._folder, self._leads, self._check)
        return num_bytes, time.perf_counter() - self._began

    def _mark(self) -> tuple[int, float]:
        if self._leads:
            self._check()
            mark(self._folder, self._step, self._beside)
        return 0, 0.0

    def _add_score(self, step: int, facts: dict[str, Any]) -> None:
        try:
            self._check()
            if add_to_marker(self.root / folder_name(step), facts):
                _prune(self.root, self._keep, self._keep_best, self._check, step)
        except (OSError, ValueError) as error:
            _log.warning(f"the score of step {step} is not in its checkpoint: {describe(error)}")

    # ---- after it

    def _give_up(self, error: BaseException | None) -> None:
        self._job, self.last_failed = None, True
        if error is not None and not isinstance(error, OSError | MemoryError | RuntimeError | LostLock):
            raise error
        # Without the marker the checkpoint does not count, and the files of other ranks are of no use.
        unmarking = self._unmark()
        error = error or unmarking
        if isinstance(error, LostLock):
            self._lost = error
            return
        remedy = "Make room (`df -h`, `df -i`), or stop and give another --checkpoint-dir"
        if isinstance(error, MemoryError):
            remedy = REMEDY
        why = _describe(error, self._folder) if error else "another rank could not write"
        log = _log.error if error or self._world.rank == 0 else _log.info
        log(
            f"the checkpoint of step {self._step} was not written on rank {self._world.rank}: {why}. Training "
            f"continues; {self._newest_in_words()}. {remedy}"
        )

    def _newest_in_words(self) -> str:
        try:
            found = newest(self.root)
        except OSError as error:
            return f"the newest complete one is unknown ({_describe(error, self.root)})"
        return f"the newest complete one is {found}" if found else "there is no complete one"


def _describe(error: BaseException, where: Path) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.strerror}: {error.filename or where}"


def _prune(root: Path, keep: int, keep_best: bool, check: Callable[[], object], last: int) -> None:
    try:
        prune(root, keep, keep_best, check, last)
    except (OSError, ValueError) as error:
        _log.error(f"older checkpoints below {root} cannot be removed: {error}; remove them by hand")


def ranks_beside(root: Path, world: World) -> list[int]:
    """Returns the ranks whose `root` is the same folder as this rank's, by rising number. A collective. Raises
    ValueError, on all ranks, if one cannot write there."""
    token = torch.tensor([secrets.randbits(62) if world.rank == 0 else 0])
    word = f".seen-by-{int(world.broadcast(token, name='checkpoint/token').item()):016x}"
    mine = root / f"{word}-{world.rank}"

    def write() -> None:
        make_folders(root)
        mine.write_text("")

    def look() -> list[int]:
        return sorted(int(name.rpartition("-")[2]) for name in os.listdir(root) if name.startswith(f"{word}-"))

    try:
        all_or_raise(write, world, "checkpoint/writable", f" cannot write to {root}")
        # Also a barrier: all look before any name is removed.
        return all_or_raise(look, world, "checkpoint/seen", f" cannot write to {root}")
    finally:
        try:
            mine.unlink(missing_ok=True)
        except OSError as error:
            _log.warning(f"{mine}, which is empty and of no more use, cannot be removed: {describe(error)}")
