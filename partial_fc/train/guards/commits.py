"""The training loop's part in elastic runs: commits, and leaving a world together."""

import logging
import socket
import time
from collections.abc import Callable

from partial_fc.checkpoint import Snapshot
from partial_fc.checkpoint.peer import PeerCopies, ProcessState
from partial_fc.comm import World, elastic

_log = logging.getLogger("partial_fc")


class Commits:
    """The commits of one world. In other than elastic runs, its methods do nothing."""

    def __init__(self, process: ProcessState, world: World, every: int):
        """every: steps from one commit to the next; 0: none. A collective."""
        self._world, self._process = world, process
        self._member = elastic.member() if elastic.active() else None
        self._copies = PeerCopies(process, world, every) if every else None

    @property
    def run(self) -> str:
        """Returns the run's name in the records of its folders."""
        return self._process.run

    @property
    def hosts_changed(self) -> bool:
        """Returns whether this rank was notified of added or removed hosts."""
        return self._member is not None and self._member.hosts_changed.is_set()

    @property
    def are_kept(self) -> bool:
        """Returns whether the newest commit that was due is kept; equal on all ranks."""
        return self._copies is not None and not self._copies.given_up

    def begin(self, step: int, take: Callable[[Callable[[int], bool]], Snapshot]) -> None:
        """Prepares commits before the first step of a world, in which replicas are missing. take: makes a snapshot of
        everything, a copy, if so many bytes may be copied; else, or without memory for it, raises MemoryError; always a
        collective."""
        self._take = take
        summary = self._member.recovery_summary() if self._member else ""
        if summary:
            _log.info(summary)
        if summary and self._world.rank == 0:
            _log.info(
                f"rank 0 is on {socket.gethostname()}: what it writes (log, loss.csv, TensorBoard, results) goes "
                "on below its --models-root"
            )
        self._commit_if_due(step)

    def start_step(self) -> None:
        if self._copies:
            self._copies.start_step()

    def end_step(self, step: int) -> None:
        """Advances the commit, after a collective that all ranks started in this step."""
        if self._member:
            self._member.step_done(step)
        if self._copies:
            self._copies.end_step()
        self._commit_if_due(step)

    def go_back(self) -> None:
        """Drops commits after a rollback to a checkpoint. Called inside a step. A collective."""
        if self._copies:
            self._copies.go_back()
            self._commit(self._copies)

    def leave(self, step: int) -> None:
        """Raises elastic.HostsChanged with the state saved: in a checkpoint if there are no commits. A collective."""
        if self._copies:
            self._copies.finish()
            self._commit(self._copies)
            self._copies.finish()
        raise elastic.HostsChanged(f"hosts were added or removed: all ranks leave after step {step} and rejoin")

    def _commit_if_due(self, step: int) -> None:
        if self._copies and self._copies.due(step):
            self._commit(self._copies)

    def _commit(self, copies: PeerCopies) -> None:
        began = time.perf_counter()
        copies.make_room()
        try:
            snapshot: Snapshot | MemoryError = self._take(copies.can_copy)
        except MemoryError as error:
            snapshot = error
        copies.begin(snapshot, time.perf_counter() - began)
