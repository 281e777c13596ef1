"""Replicas of every rank's share of the state in the memory of another host, for the loss of a host.

At a commit each rank takes a snapshot and keeps it. Its own share (its rows of the head and their state, its running
statistics) also goes to its peer, a rank of the next host: a piece in each step, by an all-to-all that overlaps with
the step. A commit is complete when all ranks have received all of it and every tensor's CRC-32 matches the sender's;
the previous one is kept until the next one begins.

After the loss of a host the others have every class range among them: their own, and those of their peers (restore.py).
If two neighbouring hosts are lost before the next commit is complete, the run resumes from disk. With one host the peer
is the next rank, and the replica survives the loss of a process only.

    bytes kept by a rank     twice its own snapshot (backbone, optimizer, its share), twice the shares kept for others
    bytes sent by a rank     its share, once a commit, at most PIECE_BYTES a step
"""

import logging
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from partial_fc.checkpoint.files import as_json
from partial_fc.checkpoint.lock import Fence, FolderLock
from partial_fc.checkpoint.peer.transfer import PIECE_BYTES, ByteStream, empty_share, outline
from partial_fc.checkpoint.snapshot import Snapshot
from partial_fc.checkpoint.this_host import identity
from partial_fc.comm import Work, World, all_gather_json
from partial_fc.comm.watch.report import ranks_in_words
from partial_fc.memory import available_memory_bytes, refusals

_SMALL_BYTES = 1 << 20  # smaller pieces are not worth a message
_MEMORY_SHARE = 0.5  # of what is free when the first commit is taken
_log = logging.getLogger("partial_fc")


@dataclass
class Commit:
    """The state after `step` updates, as far as this process has it."""

    step: int
    # The world that took it, counted from 0; ranks are numbered as in that world.
    generation: int
    local: Snapshot
    # By rank: its own share, and the replicas of others, as far as received.
    shares: dict[int, Snapshot]
    # That of `local` as JSON, and its CRC-32.
    manifest: bytes = b""
    manifest_crc: int = 0
    # Whether the replicated state is here, and not known to be damaged.
    can_lead: bool = True


@dataclass
class ProcessState:
    """The state that a process keeps from one world to the next; empty in a new process."""

    # By rising step: the last complete ones, two at most, and one under way.
    commits: list[Commit] = field(default_factory=list)
    # The number of earlier worlds of the run.
    generation: int = 0
    # The run's name in the locks of its folders; "": not started.
    run: str = ""
    # By folder: the records that this process refreshes; and the records, whichever rank refreshes them.
    locks: dict[Path, FolderLock] = field(default_factory=dict)
    fences: dict[Path, Fence] = field(default_factory=dict)


def damage(step: int, rank: int, names: Sequence[str], where: str) -> str:
    """Returns a message about damaged tensors of a rank's share."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the commit of step {step}: {names[0]}{more} of rank {rank} is damaged {where}: its CRC-32 is another"


def peers(host_W: Sequence[int]) -> list[int]:
    """Returns the rank that keeps the share of each rank: on the next host, in the order of their first ranks, whose
    ranks alternate. One host: the next rank; one rank: itself, without use."""
    hosts = list(dict.fromkeys(host_W))
    ranks = {host: [rank for rank, h in enumerate(host_W) if h == host] for host in hosts}
    if len(hosts) == 1:
        return [(rank + 1) % len(host_W) for rank in range(len(host_W))]
    peer_W = [0] * len(host_W)
    for host, following in zip(hosts, hosts[1:] + hosts[:1], strict=True):
        for i, rank in enumerate(ranks[host]):
            peer_W[rank] = ranks[following][i % len(ranks[following])]
    return peer_W


class PeerCopies:
    """The commits of one world. All ranks call its methods at the same steps.

    copies.start_step()               # where a step begins
    copies.end_step()                 # where it ends, after a collective that all ranks started in this step
    if copies.due(step):
        copies.make_room()
        copies.begin(snapshot)        # or why there is none
    """

    def __init__(self, process: ProcessState, world: World, every: int):
        """every: steps from one commit to the next. A collective."""
        self._process, self._world, self._every = process, world, every
        host = int(identity()[:15], 16)
        host_W = world.all_gather(torch.tensor([host]), name="peer/hosts").tolist()
        self._peer_W = peers(host_W)
        self._keeps = [r for r, p in enumerate(self._peer_W) if p == world.rank and r != world.rank]
        self._one_host = len(set(host_W)) == 1
        # The commit under way, and the training time lost to its snapshot and pieces.
        self._commit: Commit | None = None
        self._paused_s = self._waited_s = 0.0
        # Bytes kept for others at the last commit; bytes of the commit removed to make room for the next one.
        self._kept_bytes = self._freed_bytes = 0
        # Shares for this rank that arrived damaged.
        self._num_damaged = 0
        self._num_steps = self._num_begun = 0
        self.given_up = False  # the last commit, for want of memory
        self._outgoing = ByteStream({})
        self._incoming: dict[int, tuple[Snapshot, ByteStream]] = {}
        # Bytes that each rank has still to send, and sends in a step.
        self._left_W: list[int] = []
        self._piece_W: list[int] = []
        self._pending: Work | None = None

    @property
    def under_way(self) -> bool:
        """Returns whether a commit is incomplete; equal on all ranks."""
        return self._commit is not None

    def due(self, step: int) -> bool:
        """Returns whether to take a commit after this step: at each interval, and at once in a new world, where
        replicas are missing. A single rank has no peer, and commits only before it leaves."""
        return self._world.size > 1 and not self.under_way and (not self._num_begun or step % self._every == 0)

    def make_room(self) -> None:
        """Removes the older of two complete commits, before a snapshot is taken."""
        freed, self._process.commits = self._process.commits[:-1], self._process.commits[-1:]
        shares = [share for each in freed for share in each.shares.values() if share is not each.local]
        self._freed_bytes = sum(share.num_bytes for share in [*shares, *(each.local for each in freed)])

    def can_copy(self, num_bytes: int) -> bool:
        """Returns whether a snapshot of this size, and the replicas, fit into memory."""
        kept = self._kept_bytes or num_bytes * len(self._keeps)  # unknown before the first; shares are about equal
        need = (num_bytes + kept - self._freed_bytes) * self._world.local_size
        return need <= _MEMORY_SHARE * available_memory_bytes()

    def begin(self, snapshot: Snapshot | MemoryError, took_s: float = 0.0) -> None:
        """Starts to send; snapshot is a copy with CRCs, made in took_s seconds, or says why there is none. All ranks
        abort the commit if one has no snapshot, or no room for replicas. A collective."""
        began = time.perf_counter()
        assert not self.under_way
        rank, self._num_begun = self._world.rank, self._num_begun + 1
        problem, taken = (snapshot, None) if isinstance(snapshot, MemoryError) else (None, snapshot)
        outline_W = all_gather_json(outline(taken) if taken else None, self._world, "peer/outline")
        try:
            with refusals():
                shares = {other: empty_share(outline_W[other]) for other in self._keeps if outline_W[other]}
        except MemoryError as error:
            problem = problem or MemoryError(f"no room for the shares of others: {error}")
        outgoing = ByteStream(taken.own if taken and self._peer_W[rank] != rank else {})
        size = torch.tensor([-1 if problem else outgoing.num_bytes])
        size_W = self._world.all_gather(size, name="peer/size").tolist()
        self.given_up = min(size_W) < 0
        if self.given_up or taken is None:
            self._say_not_begun(problem, [of for of, size in enumerate(size_W) if size < 0])
            return
        assert taken.is_copy
        manifest = as_json(taken.manifest).encode()
        self._commit = Commit(
            taken.step, self._process.generation, taken, {rank: taken}, manifest, zlib.crc32(manifest)
        )
        self._process.commits = [*self._process.commits[-1:], self._commit]
        self._outgoing = outgoing
        self._incoming = {other: (share, ByteStream(share.own)) for other, share in shares.items()}
        self._kept_bytes = sum(stream.num_bytes for _, stream in self._incoming.values())
        # Spread over half of the steps to the next commit, unless very large or not worth a message.
        num_pieces = max(1, min(max(1, self._every // 2), math.ceil(max(size_W) / _SMALL_BYTES)))
        self._left_W = size_W
        self._piece_W = [min(PIECE_BYTES, math.ceil(size / num_pieces)) for size in size_W]
        self._paused_s, self._waited_s = took_s + time.perf_counter() - began, 0.0
        self._num_steps = self._num_damaged = 0
        if self._num_begun == 1:
            self._log_what_is_kept()

    def _say_not_begun(self, problem: MemoryError | None, rank_K: Sequence[int]) -> None:
        steps = [each.step for each in self._process.commits]
        log = _log.error if problem or self._world.rank == 0 else _log.info
        log(
            f"a commit is given up on all ranks: there is no memory for it on {ranks_in_words(rank_K)}"
            f"{f' (here: {problem})' if problem else ''}. Training continues; "
            f"{f'the commit of step {steps[-1]} remains' if steps else 'there is no other one'}, and the next one "
            f"follows after {self._every} steps. --commit-every 0 turns commits off; more hosts or processes have "
            "less each"
        )

    def start_step(self) -> None:
        """Starts to send a piece, if any is left."""
        if not any(self._left_W):
            return
        size_W = [min(left, piece) for left, piece in zip(self._left_W, self._piece_W, strict=True)]
        rank, ranks = self._world.rank, range(self._world.size)
        go_W = [size_W[rank] if to == self._peer_W[rank] and to != rank else 0 for to in ranks]
        come_W = [size_W[of] if of in self._incoming else 0 for of in ranks]
        self._left_W = [left - size for left, size in zip(self._left_W, size_W, strict=True)]
        piece = self._outgoing.read(size_W[rank])
        self._coming = come_W
        self._pending = self._world.start_all_to_all(piece, go_W, come_W, name="peer/share")

    def end_step(self) -> None:
        """Receives the pieces for this rank. A commit that was complete at the step's start is so on all ranks."""
        if self._commit is None:
            return
        if self._pending is None:
            self._complete(self._commit)
            return
        began = time.perf_counter()
        pieces = self._pending.wait().split(self._coming)
        self._pending = None
        for other, (_, stream) in self._incoming.items():
            stream.write(pieces[other])
        if not any(self._left_W):
            for other, (share, stream) in self._incoming.items():
                damaged = [name for name, crc in stream.crcs.items() if crc != share.crcs[name]]
                if damaged:
                    _log.error(damage(self._commit.step, other, damaged, f"as it arrived on rank {self._world.rank}"))
                    self._num_damaged += 1
                else:
                    self._commit.shares[other] = share
        self._waited_s += time.perf_counter() - began
        self._num_steps += 1

    def finish(self) -> None:
        """Returns when the commit under way is complete. A collective."""
        while self.under_way:
            self.start_step()
            self._world.barrier(name="peer/finish")
            self.end_step()

    def go_back(self) -> None:
        """Removes all commits after a rollback. Called inside a step."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = self._commit = None
        self._incoming, self._left_W = {}, []
        self._process.commits = []

    def _complete(self, commit: Commit) -> None:
        """Completes the commit. A collective."""
        damaged_W = self._world.all_gather(torch.tensor([self._num_damaged]), name="peer/damaged").tolist()
        self._commit = None
        if any(damaged_W):
            self._process.commits = [each for each in self._process.commits if each is not commit]
            steps = [each.step for each in self._process.commits]
            ranks = [rank for rank, count in enumerate(damaged_W) if count]
            _log.error(
                f"the commit of step {commit.step} is given up on all ranks: a copy arrived damaged on "
                f"{ranks_in_words(ranks)}. "
                f"{f'The commit of step {steps[-1]} remains' if steps else 'There is no other one'}; "
                "if this happens again, memory or network of a host is faulty"
            )
        elif self._num_begun <= 3:  # the first one of a world, and the first ones of its usual size
            kept = sum(stream.num_bytes for _, stream in self._incoming.values())
            _log.info(
                f"the commit of step {commit.step} is complete: {commit.local.num_bytes / 1e6:.1f} MB here, of which "
                f"{self._outgoing.num_bytes / 1e6:.1f} MB have gone to the peer, and {kept / 1e6:.1f} MB kept for "
                f"others. Its snapshot paused training for {self._paused_s:.3f} s, its copies, on their way in "
                f"{self._num_steps} steps, for {self._waited_s:.3f} s"
            )
        self._incoming, self._outgoing = {}, ByteStream({})

    def _log_what_is_kept(self) -> None:
        survives = "the loss of a process, not of the host" if self._one_host else "the loss of a host"
        if self._world.size == 1:
            survives = "nothing: there is no other rank, and none is made before hosts come"
        _log.info(
            f"commits every {self._every} steps survive {survives}. This rank's peer is rank "
            f"{self._peer_W[self._world.rank]}; it keeps copies for ranks {', '.join(map(str, self._keeps)) or 'none'}"
        )
