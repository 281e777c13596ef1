"""Memory that the system refuses costs the checkpoint's background, or the commit, that it was for: training goes on,
and the next one is tried."""

import gc
import mmap

import pytest
import torch
from torch import Tensor

from partial_fc import checkpoint
from partial_fc.checkpoint import folders
from partial_fc.checkpoint.peer.commits import PeerCopies, ProcessState
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC
from partial_fc.memory import refusals
from partial_fc.train.guards.commits import Commits
from tests.unit.thread_world import in_world

NUM_BYTES = 64 << 40  # half of the addresses of a process: twice that is refused on any machine
_NORESERVE = 0x4000  # mmap(2)


def huge() -> Tensor:
    """Zeros that take no memory."""
    gc.collect()  # another test's, held by the error that it led to: there are addresses for one
    pages = mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def test_what_torch_is_refused_is_a_memory_error_and_nothing_else_is():
    with pytest.raises(MemoryError, match="can't allocate memory"), refusals():
        torch.empty(2 * NUM_BYTES, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"), refusals():
        torch.zeros(2) @ torch.zeros(3)


def test_a_backbone_that_cannot_be_copied_is_written_while_training_stands_still(caplog):
    head, world, weights = PartialFC(11, 6, CosFace()), SingleWorld(), {"w": huge()}
    assert not checkpoint.capture(1, weights, {}, {}, head, {}, world=world, behind=True).is_copy
    assert f"no memory for a copy of this rank's {NUM_BYTES / 1e6:,.1f} MB" in caplog.text
    assert "More processes or hosts have less each" in caplog.text


def test_a_rank_without_memory_for_a_snapshot_costs_that_checkpoint_on_all(tmp_path, caplog):
    def act(world):
        head = PartialFC(11, 6, CosFace(), world=world)
        saver = checkpoint.Saver(tmp_path, world, keep=2)
        for step in (1, 2, 3):
            if step == 2 and world.rank == 1:
                saver.abort(step, MemoryError("no memory for 7 MB"))
            else:
                saver.begin(checkpoint.capture(step, {}, {}, {}, head, {}, world=world))
            saver.finish()
            assert saver.last_failed == (step == 2)
        saver.close()

    in_world(2, act)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["step-00000001", "step-00000003"]
    assert "was not written on rank 1: no memory for 7 MB" in caplog.text


def taken(head: PartialFC, step: int, own: dict[str, Tensor], can_copy=True) -> checkpoint.Snapshot:
    return checkpoint.capture(step, {}, {}, own, head, {}, world=head.world, copy=can_copy, checksums=True)


@pytest.mark.parametrize("refused", ["the copy", "the room"])
def test_a_commit_that_one_rank_has_no_memory_for_is_given_up_on_all_and_the_next_is_tried(caplog, refused):
    """Rank 1 is refused its own copy, or rank 0, which keeps its share, the room for that."""

    def act(world):
        head, memory = PartialFC(11, 6, CosFace(), world=world), ProcessState()
        own = {"buffer/b": huge()} if world.rank == 1 else {}
        copies = PeerCopies(memory, world, every=1)
        if refused == "the copy":
            Commits(memory, world, every=1).begin(0, lambda can_copy: taken(head, 1, own, can_copy))
        else:
            snapshot = taken(head, 1, {})
            snapshot.local, crcs = own, {f"local/{name}": 0 for name in own}
            snapshot.crcs |= crcs
            copies.begin(snapshot)
            copies.finish()
        steps = [[commit.step for commit in memory.commits]]
        for step in (2, 3, 4):
            copies.make_room()
            copies.begin(taken(head, step, {}, copies.can_copy))
            copies.finish()
            steps.append([commit.step for commit in memory.commits])
        return steps

    assert in_world(2, act) == [[[], [2], [2, 3], [3, 4]]] * 2
    rank = 1 if refused == "the copy" else 0
    assert f"a commit is given up on all ranks: there is no memory for it on rank {rank} (here:" in caplog.text
    assert "--commit-every 0" in caplog.text
    assert f"{NUM_BYTES / 1e6:,.1f} MB" in caplog.text or f"tried to allocate {NUM_BYTES} bytes" in caplog.text


def test_a_commit_is_not_begun_where_what_is_free_would_not_hold_it(monkeypatch):
    """The older commit, which goes for it, makes room."""

    def act(world):
        head, memory = PartialFC(11, 6, CosFace(), world=world), ProcessState()
        copies = PeerCopies(memory, world, every=1)
        assert len(head.centres)  # makes them all
        for step in (1, 2):
            copies.begin(taken(head, step, {}))
            copies.finish()
        size = memory.commits[0].local.num_bytes
        world.barrier()
        monkeypatch.setattr("partial_fc.checkpoint.peer.commits.available_memory_bytes", lambda: 0)
        assert not copies.can_copy(size)
        copies.make_room()
        assert copies.can_copy(size)
        with pytest.raises(MemoryError, match="are needed for this rank's copy"):
            taken(head, 3, {"buffer/b": torch.zeros(100)}, copies.can_copy)
        return [commit.step for commit in memory.commits]

    assert in_world(2, act) == [[2], [2]]
