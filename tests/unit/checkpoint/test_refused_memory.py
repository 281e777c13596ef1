"""Memory that the system refuses costs the checkpoint's background: training goes on, and the next one is tried."""

import gc
import mmap

import pytest
import torch
from torch import Tensor

from partial_fc import checkpoint
from partial_fc.checkpoint import folders
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC
from partial_fc.memory import refusals
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
