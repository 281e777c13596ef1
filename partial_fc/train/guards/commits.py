"""The training loop's part in elastic runs: commits, and leaving a world together."""

import logging
import socket
import time
from collections.abc import Callable

from partial_fc.checkpoint import Snapshot
from partial_fc.checkpoint.peer import PeerCopies, ProcessState
from partial_fc.comm import World, elastic
from partial_fc.head import Head

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
        return self._copies is not None

    def begin(
        self, step: int, head: Head, take: Callable[[Callable[[int], bool]], Snapshot], more_bytes: Callable[[], int]
    ) -> None:
        """Prepares commits before the first step of a world, in which replicas are missing. If a rank has too little
        memory, the first world of a run raises ValueError, on all ranks, and later ones continue without commits. take:
        makes a snapshot of everything, a copy, if so many bytes may be copied; else, or without memory for it, raises
        MemoryError; always a collective. more_bytes: of a snapshot besides the head's; a collective."""
        self._take = take
        summary = self._member.recovery_summary() if self._member else ""
        if summary:
            _log.info(summary)
        if summary and self._world.rank == 0:
            _log.info(
                f"rank 0 is on {socket.gethostname()}: what it writes (log, loss.csv, TensorBoard, results) goes "
                "on below its --models-root"
            )
        short = self._copies.too_little_memory(head, more_bytes()) if self._copies else ""
        if short and self._process.generation <= 1:
            raise ValueError(
                f"{short}: --commit-every 0 goes without them, and a lost host then costs the steps since the last "
                "checkpoint"
            )
        if short:  # fewer hosts have larger shares: the loss that commits are for must not end the run
            _log.warning(
                f"{short}: continuing without commits; a host that is lost from now on costs the steps since the last "
                "checkpoint"
            )
            self._process.commits, self._copies = [], None
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
