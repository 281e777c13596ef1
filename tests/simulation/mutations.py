"""Faults made by hand in the product: what the simulation has to find, or it finds nothing."""

import dataclasses
from typing import Any

from partial_fc.checkpoint import folders, saver
from partial_fc.checkpoint.peer import commits
from partial_fc.checkpoint.peer import restore as recovery
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.comm.elastic import barrier, membership
from partial_fc.train import resume
from partial_fc.train.guards import commits as commits_of_loop
from tests.simulation.product import Replacement

_Copies, _begin = commits.PeerCopies, commits.PeerCopies.begin


def _counted_at_once(copies: Any, *given: Any) -> None:
    _begin(copies, *given)
    copies._memory.commits = [copies._commit]


def _kept_at_once(copies: Any, *given: Any) -> None:
    _begin(copies, *given)
    copies._commit.shares |= {rank: share for rank, (share, _) in copies._incoming.items()}


def _always_first(memory: Any, world: Any, root: Any) -> Any:
    found = _recover(memory, world, root)
    memory.generation = 1
    return found


def _step_stays(*given: Any, **more: Any) -> Any:
    start = _resume(*given, **more)
    return dataclasses.replace(start, step=max(start.step, membership.member().furthest_step))


def _position_goes_on(*given: Any, **more: Any) -> Any:
    start = _resume(*given, **more)
    if membership.member().losses_without_progress:
        return dataclasses.replace(start, position=start.position + 2 * given[0].world.size)
    return start


def _disk_first(memory: Any, world: Any, root: Any) -> Any:
    if folders.newest(root):
        memory.commits = []
    return _recover(memory, world, root)


def _leaves_at_once(commits_here: Any, step: int) -> None:
    raise membership.HostsChanged("hosts were added or removed")


def _waits_for_nobody(at: Any, arrive_s: float, silent_s: float) -> str:
    return ""


def _marked_early(here: Any, any_busy: bool, any_failed: bool) -> None:
    _poll(here, here.busy, any_failed)


def _next_rank(host_W: Any) -> list[int]:
    return [(rank + 1) % len(host_W) for rank in range(len(host_W))]


_recover, _resume, _poll = recovery.recover, resume.resume, saver.Saver.poll
# By what they are called: where, which name, and what it means then.
MUTATIONS: dict[str, list[Replacement]] = {
    "each world counts as the first": [(resume, "recover", _always_first)],
    "a commit counts when it is begun": [(_Copies, "begin", _counted_at_once)],
    # Either alone harms nothing: what has not come has not its sender's CRC.
    "what is kept for others counts before it came": [
        (_Copies, "begin", _kept_at_once),
        (recovery, "_leave_out_damaged", lambda *given: False),
    ],
    "the step is not taken back": [(resume, "resume", _step_stays)],
    "images that were lost are not seen again": [(resume, "resume", _position_goes_on)],
    "a checkpoint goes before a newer commit": [(resume, "recover", _disk_first)],
    "ranks leave without a commit": [(commits_of_loop.Commits, "leave", _leaves_at_once)],
    "the peer is on the same host": [(commits, "peers", _next_rank)],
    "nobody waits for the others of a new world": [(barrier.Barrier, "wait", _waits_for_nobody)],
    "a checkpoint is marked when one rank has written": [(saver.Saver, "poll", _marked_early)],
    "checksums are not compared": [(Checkpoint, "check", lambda found, path: None)],
}
