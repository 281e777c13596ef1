"""Memory that the system refuses costs the checkpoint's background, or the commit, that it was for: training goes on,
and the next one is tried."""

import logging
import resource
from contextlib import contextmanager

import psutil
import pytest
import torch

from partial_fc import checkpoint
from partial_fc.checkpoint import folders
from partial_fc.checkpoint.peer.commits import Memory, PeerCopies
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC
from partial_fc.memory import refusals
from partial_fc.train.guards.commits import Commits
from tests.unit.thread_world import in_world

LARGE = 30_000_000  # numbers: 120 MB of zeros, which take no memory until they are copied


@pytest.fixture(autouse=True)
def said(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("partial_fc"), "propagate", True)
    return caplog


@contextmanager
def no_more_than(num_bytes: int):
    """The system gives this process no more than so many bytes besides what it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_what_torch_is_refused_is_a_memory_error_and_nothing_else_is():
    with no_more_than(70_000_000), pytest.raises(MemoryError, match="can't allocate memory"), refusals():
        torch.zeros(LARGE)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"), refusals():
        torch.zeros(2) @ torch.zeros(3)


def test_a_backbone_that_cannot_be_copied_is_written_while_training_stands_still(tmp_path, said):
    head, world = PartialFC(11, 6, CosFace()), SingleWorld()
    weights = {"w": torch.zeros(10_000_000)}
    saver = checkpoint.Saver(tmp_path, world, keep=1)
    with no_more_than(25_000_000):
        taken = checkpoint.capture(1, weights, {}, {}, head, {}, world=world, behind=True)
        saver.begin(taken)
        saver.finish()
    saver.close()
    assert not taken.is_copy
    assert not saver.last_failed
    assert (tmp_path / "step-00000001/backbone.safetensors").stat().st_size > 40_000_000
    assert "no memory for a copy of this rank's 40.0 MB" in said.text


def test_a_rank_without_memory_for_a_snapshot_costs_that_checkpoint_on_all(tmp_path, said):
    def act(world):
        head = PartialFC(11, 6, CosFace(), world=world)
        saver = checkpoint.Saver(tmp_path, world, keep=2)
        for step in (1, 2, 3):
            if step == 2 and world.rank == 1:
                saver.begin_without(step, MemoryError("no memory for 7 MB"))
            else:
                saver.begin(checkpoint.capture(step, {}, {}, {}, head, {}, world=world))
            saver.finish()
            assert saver.last_failed == (step == 2)
        saver.close()

    in_world(2, act)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["step-00000001", "step-00000003"]
    assert "was not written on rank 1: no memory for 7 MB" in said.text


class _Takes:
    """Makes snapshots, of which those of one rank are large."""

    def __init__(self, world, large: int):
        self.world, self.step = world, 0
        self.head = PartialFC(11, 6, CosFace(), world=world)
        self.own = {"buffer/b": torch.zeros(large)} if world.rank == 1 else {}

    def __call__(self, can_copy=True) -> checkpoint.Snapshot:
        self.step += 1
        return checkpoint.capture(
            self.step, {}, {}, self.own, self.head, {}, world=self.world, copy=can_copy, checksums=True
        )


def _steps(memory: Memory) -> list[int]:
    return [commit.step for commit in memory.commits]


@pytest.mark.parametrize("refused", ["the copy", "the room"])
def test_a_commit_that_one_rank_has_no_memory_for_is_given_up_on_all_and_the_next_is_tried(monkeypatch, said, refused):
    """The rank with the large share is refused its copy, by the system or as more than what is free; or its peer the
    room for that share."""
    memories = [Memory(), Memory()]
    takes: list[_Takes] = []

    def start(world):
        return _Takes(world, LARGE)

    takes = in_world(2, start)
    made = [take() for take in takes] if refused == "the room" else None

    def attempt(world):
        if made is not None:
            copies = PeerCopies(memories[world.rank], world, every=1)
            copies.begin(made[world.rank])
            copies.finish()
        else:
            commits = Commits(memories[world.rank], world, every=1)
            commits.begin(0, takes[world.rank].head, takes[world.rank], 0)
        return _steps(memories[world.rank])

    with no_more_than(90_000_000):
        assert in_world(2, attempt) == [[], []]
    rank = 1 if refused == "the copy" else 0
    assert f"a commit is given up on all ranks: there is no memory for it on rank {rank}" in said.text
    assert "--commit-every 0 goes without" in said.text
    assert "120.0 MB" in said.text if refused == "the copy" else "you tried to allocate 120000000 bytes" in said.text

    def again(world):
        copies = PeerCopies(memories[world.rank], world, every=1)
        take = takes[world.rank]
        take.own = {}
        for _ in range(3):
            copies.make_room()
            copies.begin(take(copies.can_copy))
            copies.finish()
        monkeypatch.setattr("partial_fc.checkpoint.peer.commits.available_memory_bytes", lambda: 0)
        copies.make_room()
        assert copies.can_copy(0)
        with pytest.raises(MemoryError, match="are needed for this rank's copy"):
            take(lambda num_bytes: copies.can_copy(num_bytes + 10_000))
        return len(_steps(memories[world.rank]))

    assert in_world(2, again) == [1, 1]
