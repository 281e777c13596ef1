"""What must hold, whatever happens: looks on while the product's code runs, and raises Violation.

The state after a step is one number, made of the number before, the step, and the images of all ranks; every class's
row, and what a rank has for itself, are made of that number. So a state says which steps and images are in it, and that
all of its parts are of one step.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from partial_fc.checkpoint import folders
from partial_fc.checkpoint.files import checksums_name
from partial_fc.checkpoint.peer.commits import Commit, ProcessState
from tests.simulation.disk import File, Path

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster, Process
    from tests.simulation.collectives import Communicator
    from tests.simulation.driver import Driver

START = 1
_LATELY_S = 12.0


class Violation(AssertionError):
    """What must never be has been."""


def mix(*numbers: int) -> int:
    """A number of 62 bits made of others."""
    value = 0x9E3779B9
    for number in numbers:
        value = (value ^ (number & (1 << 64) - 1)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        value ^= value >> 31
    return value >> 2


@dataclass(frozen=True)
class Made:
    """A step as it is in a state."""

    step: int
    begin: int  # positions of its images, from
    end: int  # to
    before: int  # the state that it was made from
    loss: float


@dataclass(frozen=True)
class Whole:
    """A commit that all ranks of a world have: who keeps the share of each rank, itself and its peer, as long as they
    have no newer one."""

    step: int
    generation: int
    keepers: tuple[set["Process"], ...]
    world: int


class Oracle:
    """One for a simulation."""

    def __init__(self, cluster: "Cluster", num_samples: int):
        self.cluster, self._num_samples = cluster, num_samples
        self.made: dict[int, Made] = {}
        self.finished: int | None = None  # the state at the end
        self.num_worlds = 0
        self._in_world: dict[tuple[str, int, int], Any] = {}  # what ranks of a world must agree on
        self._steps_of: dict[tuple[int, int], set[Process]] = {}
        self._furthest_world: dict[int, tuple[int, float]] = {}
        self._began: dict[tuple[int, int, Process], float] = {}
        self._whole: list[Whole] = []
        self._held: dict[int, dict[Process, list[tuple[int, int, int, list[int]]]]] = {}
        self._newest_on_disk: dict[int, int] = {}
        # Folders of checkpoints that are not whole any more, with the marker that they had then.
        self.damaged: dict[str, File] = {}
        self._compared: dict[str, set[Process]] = {}
        self._disturbed: list[float] = []
        # What happens when a world has met, or trains.
        self.afterwards: dict[tuple[int, bool], list[Callable[[], None]]] = {}
        self.disk_was_bad = False

    # ---- worlds

    def met(self, comm: "Communicator", driver: "Driver") -> None:
        self.num_worlds += 1
        for act in self.afterwards.pop((self.num_worlds, False), []):
            act()
        members = comm.members
        self.cluster.trace(f"world {comm.number}: {', '.join(map(str, members))}")
        check(len(set(members)) == len(members), f"a process has two ranks in world {comm.number}")
        check(len({self.cluster.driver_of(p).number for p in members}) == 1, "processes of two jobs in one world")

    def agree(self, what: str, step: int, value: object) -> None:
        """The ranks of a world say the same of a step."""
        comm = self.cluster.here.comm
        assert comm is not None
        first = self._in_world.setdefault((what, comm.number, step), value)
        check(first == value, f"world {comm.number}, step {step}: {what} is {value} on one rank, {first} on another")

    def disturbed(self) -> None:
        """Something befalls the cluster, or is over, or a process ends."""
        self._disturbed.append(self.cluster.clock.now)

    def waited_in_vain(self, since: float) -> None:
        """A process ends, as not all have come into hvd.init: all of them said that they would be there."""
        check(
            any(at > since - _LATELY_S for at in self._disturbed),
            "hvd.init has waited in vain, and nothing befell anybody",
        )

    # ---- what a world goes on from

    def recovering(self, memory: ProcessState) -> None:
        """Before a rank looks what it has."""
        me = self.cluster.here
        assert me.comm is not None
        me.memory = memory
        held = [(c.step, c.generation, c.local.world_size, sorted(c.shares)) for c in memory.commits]
        self._held.setdefault(me.comm.number, {})[me] = held
        self._newest_on_disk.setdefault(me.comm.number, self.newest_on_disk())

    def newest_on_disk(self) -> int:
        """The newest checkpoint that is marked and whole; -1: none."""
        disk = self.cluster.disk
        marked = [name.rpartition("/")[0] for name in disk.files if name.endswith("/" + folders.MARKER)]
        marked = [each for each in marked if disk.files[f"{each}/{folders.MARKER}"] is not self.damaged.get(each)]
        marked = [each for each in marked if each.rpartition("step-")[2].isdecimal()]  # not those set aside
        for folder in marked:
            self._check_whole(folder)
        steps = [folder.rpartition("step-")[2] for folder in marked]
        return max(map(int, steps), default=-1)

    def _check_whole(self, folder: str) -> None:
        """A checkpoint with a marker has the files of all ranks."""
        inside = [name.rpartition("/")[2] for name in self.cluster.disk.files if name.startswith(f"{folder}/")]
        check(folders.MANIFEST in inside, f"{folder} is marked and has no manifest")
        size = json.loads(self.cluster.disk.files[f"{folder}/{folders.MANIFEST}"].data)["world_size"]
        lists = {name for name in inside if name.endswith(".sha256")}
        check(lists == {checksums_name(rank, size) for rank in range(size)}, f"{folder} is marked and has only {lists}")

    def compares(self, name: str) -> None:
        """A rank looks whether a checkpoint's file is whole."""
        self._compared.setdefault(name, set()).add(self.cluster.here)

    def is_relied_on(self, name: str) -> bool:
        """Whether a rank has found this file whole, and may not have read it yet: what changes between is not noticed
        (docs/reliability.md)."""
        return any(not each.dead and each.exit_code is None for each in self._compared.get(name, ()))

    def refused(self, error: Exception) -> None:
        """A trainer has ended with it: what it says is damaged is taken away, as it advises."""
        for folder in [folder for folder in self.damaged if folder in str(error)]:
            del self.damaged[folder]
            self.disk_was_bad = True
            for name in [name for name in self.cluster.disk.files if name.startswith(f"{folder}/")]:
                del self.cluster.disk.files[name]

    def resumed(self, rank: int, step: int, position: int, state: int, rows: dict[int, int], own: int | None) -> None:
        """After a rank has loaded what it goes on from. rows: by class, as far as they were created."""
        me = self.cluster.here
        comm = me.comm
        assert comm is not None
        for compared in self._compared.values():
            compared.discard(me)
        self.agree("the state that it goes on from", -1, (step, position, state))
        made = self.made.get(state)
        if state == START:
            check((step, position) == (0, 0), f"step {step}, position {position} with a state that nothing was done to")
        else:
            check(made is not None, f"step {step}: a state that no step has made")
            found = made.step, made.end
            check(found == (step, position), f"(step, position) {(step, position)} with the state of {found}")
        for number, value in rows.items():
            check(value == mix(state, number), f"step {step}: the row of class {number} is of another state")
        if own is not None:
            check(own == mix(state, rank), f"step {step}: rank {rank} has what another rank or state had for its own")
        self._check_not_older(comm, step)
        self._keeps_no_more(me, step)
        self.cluster.trace(f"goes on from step {step}, position {position}, state {state % 10**6}")

    def _check_not_older(self, comm: "Communicator", step: int) -> None:
        disk = self._newest_on_disk[comm.number]
        check(step >= disk, f"goes on from step {step}; a whole checkpoint of step {disk} is on the disk")
        held = self._held[comm.number]
        if len(held) == len(comm.members):
            for number, generation, size, _ in (each for commits in held.values() for each in commits):
                ranks = {
                    r
                    for commits in held.values()
                    for s, a, _, has in commits
                    if (s, a) == (number, generation)
                    for r in has
                }
                if ranks >= set(range(size)):
                    check(
                        step >= number, f"goes on from step {step}; its ranks have all of the commit of step {number}"
                    )
        for whole in self._whole:
            if all(keepers.intersection(comm.members) for keepers in whole.keepers):
                check(
                    step >= whole.step,
                    f"goes on from step {step}; the commit of step {whole.step} of world {whole.world} was whole, and "
                    "each share's keepers are there",
                )

    def whole(self, commit: Commit) -> None:
        """A rank takes a commit for whole."""
        comm = self.cluster.here.comm
        assert comm is not None
        members = comm.members
        peers = self._expected_peers([p.host.name for p in members])
        keepers = [(p, members[peer]) for p, peer in zip(members, peers, strict=True)]
        self._keeps_no_more(self.cluster.here, commit.step, comm.number)
        self._whole.append(Whole(commit.step, commit.generation, tuple(map(set, keepers)), comm.number))
        del self._whole[:-50]
        for rank, (sender, keeper) in enumerate(keepers):
            if keeper is self.cluster.here is not sender:
                self._check_same(commit, rank, sender.memory)

    def _keeps_no_more(self, process: "Process", step: int, world: int = 0) -> None:
        """What is older than this step, or of this one in earlier worlds, may be forgotten, and so what it goes on from
        when there is more than one commit of that step: a second loss before the next one is whole can cost all."""
        held = {(commit.step, commit.generation) for commit in process.memory.commits}
        for whole in self._whole:
            if (whole.step, whole.world) < (step, world) or (
                whole.step == step and (step, whole.generation) not in held
            ):
                for keepers in whole.keepers:
                    keepers.discard(process)

    def _check_same(self, commit: Commit, rank: int, of_sender: ProcessState) -> None:
        """What is kept for a rank is what that took."""
        what = f"the commit of step {commit.step} counts as whole"
        check(rank in commit.shares, f"{what}; that of rank {rank} is not there")
        taken, kept = of_sender.commits[-1].local, commit.shares[rank].own
        if taken.step == commit.step:  # else the sender has begun the next one
            same = taken.own.keys() == kept.keys() and all(torch.equal(t, kept[name]) for name, t in taken.own.items())
            check(same, f"{what}; rank {rank} has taken another share than is kept for it")

    def left(self, step: int, commits_are_kept: bool) -> None:
        """A rank leaves because hosts come or go, with nothing lost."""
        comm = self.cluster.here.comm
        assert comm is not None
        gone = self._in_world.setdefault(("left", comm.number, step), set())
        gone.add(self.cluster.here)
        if len(gone) == len(comm.members) and commits_are_kept:
            generation = self.cluster.here.memory.commits[-1].generation
            self._whole.append(Whole(step, generation, tuple({p} for p in comm.members), comm.number))

    def _expected_peers(self, hosts: Sequence[str]) -> list[int]:
        """A rank of the next host; which, is found out from what the ranks say."""
        first = list(dict.fromkeys(hosts))
        if len(first) == 1:
            return [(rank + 1) % len(hosts) for rank in range(len(hosts))]
        ranks = {host: [rank for rank, each in enumerate(hosts) if each == host] for host in first}
        following = dict(zip(first, first[1:] + first[:1], strict=True))
        return [
            ranks[following[host]][ranks[host].index(rank) % len(ranks[following[host]])]
            for rank, host in enumerate(hosts)
        ]

    def stopped(self, step: int) -> None:
        """A rank ends as it was asked to, and says that all is in a checkpoint."""
        found = self.newest_on_disk()
        check(found >= step or self.damaged or self.disk_was_bad, f"stopped at step {step}; the disk has step {found}")

    # ---- steps

    def begins(self, step: int) -> None:
        me = self.cluster.here
        assert me.comm is not None
        for act in self.afterwards.pop((me.comm.number, True), []):
            act()
        self._began[me.comm.number, step, me] = self.cluster.clock.now

    def step(self, step: int, begin: int, end: int, keys: Sequence[int], before: int, state: int, loss: float) -> None:
        """A rank has made a step with these images."""
        me = self.cluster.here
        comm = me.comm
        assert comm is not None
        self.agree("the state", step, (begin, end, before, state))
        seen = self._in_world.setdefault(("images", comm.number, step), {})
        seen[me] = list(keys)
        if len(seen) == len(comm.members):
            images = sorted(key for these in seen.values() for key in these)
            check(images == sorted(p % self._num_samples for p in range(begin, end)), f"step {step}: images {images}")
            self._check_alone(comm, step)
        earlier = self.made.get(before)
        if before == START:
            check((step, begin) == (1, 0), f"step {step} from position {begin} is the first in its state")
        else:
            check(earlier is not None, f"step {step} of a state that no step has made")
            check(earlier.step == step - 1, f"step {step} after step {earlier.step}")
            check(earlier.end == begin, f"step {step}: images from {begin}; those before ended at {earlier.end}")
        self.made[state] = Made(step, begin, end, before, loss)

    def _check_alone(self, comm: "Communicator", step: int) -> None:
        """No world of a job makes a whole step that began after a later one of that job had made one."""
        job = self.cluster.driver_of(comm.members[0]).number
        number, since = self._furthest_world.get(job, (0, 0.0))
        if comm.number > number:
            self._furthest_world[job] = comm.number, self.cluster.clock.now
        elif comm.number < number:
            began = min(self._began[comm.number, step, p] for p in comm.members)
            check(began < since, f"world {comm.number} makes step {step} beside world {number}, which has replaced it")

    # ---- the end

    def check_end(self, root: Path, total_steps: int | None, last_position: float) -> None:
        """The run is through: each step is in the final state once, in the log of losses, and in a whole checkpoint."""
        check(self.finished is not None, "nobody has come to the end")
        state, chain = self.finished, []
        while state != START:
            made = self.made[state]
            chain.append(made)
            state = made.before
        chain.reverse()
        check([made.step for made in chain] == list(range(1, len(chain) + 1)), "steps of the final state")
        if total_steps is not None:
            check(len(chain) == total_steps, f"{len(chain)} steps in the final state, expected {total_steps}")
        check(chain[-1].end >= last_position, f"images up to {chain[-1].end}, expected {last_position}")
        check(chain[-1].begin < last_position or total_steps is not None, "a step more than the data needs")
        result = json.loads(self.cluster.disk.files[f"{root}/result.json"].data)
        check(result["state"] == self.finished, "result.json is of another state")
        rows = self.cluster.disk.files[f"{root}/loss.csv"].data.decode().splitlines()[1:]
        if not self.disk_was_bad:
            expected = [f"{made.step},{made.loss:.9g}" for made in chain]
            check([row.rpartition(",")[0] for row in rows] == expected, f"loss.csv has {len(rows)} rows: {rows[-3:]}")
        was_damaged = bool(self.damaged) or self.disk_was_bad
        check(self.newest_on_disk() == len(chain) or was_damaged, "the last state is in no whole checkpoint")


def check(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)
