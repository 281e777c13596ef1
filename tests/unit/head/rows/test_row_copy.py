"""A checkpoint whose rows are copied while training goes on has the bits of one that was copied at once, and training
those of a run without it."""

import logging
import threading

import pytest
import torch

from partial_fc import checkpoint
from partial_fc.checkpoint import folders
from partial_fc.head import CosFace, PartialFC
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD, Storage, copying
from tests.flat import flat_head
from tests.unit.thread_world import in_world

C, D, G = 400, 16, 8


def head_of(world, **kind) -> PartialFC:
    return flat_head(C, D, CosFace(scale=8.0, margin=0.1), world=world, **kind)


def one_step(head, world) -> float:
    """The batch is a function of the step and the rank."""
    made = torch.Generator().manual_seed(10 * head.num_steps + world.rank)
    feat_BD = torch.randn(G, D, generator=made).requires_grad_()
    loss = head(feat_BD, torch.randint(0, C, (G,), generator=made))
    loss.backward()
    head.step(0.05)
    return loss.item()


def taken(head, world, **how) -> checkpoint.Snapshot:
    return checkpoint.capture(head.num_steps, {}, {}, {}, head, {}, world=world, **how)


def rows_of(snapshot) -> list:
    return [
        (part.start, part.stop, {name: t.clone() for name, t in part.tensors.items()})
        for part in snapshot.tables[""].parts
    ]


def same_rows(one: list, other: list) -> bool:
    return len(one) == len(other) and all(
        a[:2] == b[:2] and a[2].keys() == b[2].keys() and all(torch.equal(t, b[2][name]) for name, t in a[2].items())
        for a, b in zip(one, other, strict=True)
    )


BF16 = Storage(torch.bfloat16)
KINDS = {
    "sgd": {"sample_rate": 0.1, "optimizer": RowSGD(momentum=0.9)},
    "sgd, all rows": {"sample_rate": 1.0, "optimizer": RowSGD(momentum=0.9)},
    "adamw, bf16": {"sample_rate": 0.1, "optimizer": RowAdamW(), "storage": BF16},
    "adamw, bf16, all rows": {"sample_rate": 1.0, "optimizer": RowAdamW(), "storage": BF16},
    "adamw, sub-centres": {"sample_rate": 0.1, "optimizer": RowAdamW(), "sub_centres": 3},
    "adagrad, plain": {"sample_rate": 0.1, "optimizer": RowAdagrad(), "impl": "plain"},
    "caught up": {"sample_rate": 0.1, "optimizer": RowSGD(momentum=0.9), "catch_up": "exact"},
    "caught up, plain": {"sample_rate": 1.0, "optimizer": RowAdamW(), "catch_up": "exact", "impl": "plain"},
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("size", "all_made"),
    [(1, True), (2, False), *(pytest.param(*few, marks=pytest.mark.long) for few in ((1, False), (2, True)))],
)
def test_it_is_what_it_was_when_it_was_taken(monkeypatch, name, size, all_made):
    """Nobody copies while steps are made (so training has to), somebody does, or all at once."""
    monkeypatch.setattr(copying, "_CHUNK_BYTES", 500)

    def train(world):
        head, undisturbed = head_of(world, **KINDS[name]), head_of(world, **KINDS[name])
        if all_made:
            assert len(head.centres) == len(undisturbed.centres)
        for after in (5, 2, 0):
            for _ in range(2):
                assert one_step(head, world) == one_step(undisturbed, world)
            expected, behind = rows_of(taken(head, world)), taken(head, world, behind=True)
            assert behind.tables[""].copying is not None
            assert (sum(len(part["touched"]) for _, _, part in expected) == len(head.shard)) >= all_made
            beside = [threading.Thread(target=behind.tables[""].copying.finish) for _ in range(after == 2)]
            for thread in beside:
                thread.start()
            for _ in range(after):
                assert one_step(head, world) == one_step(undisturbed, world)
            for thread in beside:
                thread.join()
            behind.tables[""].copying.finish()
            assert same_rows(rows_of(behind), expected)
        return True

    assert all(in_world(size, train))


def test_a_snapshot_within_a_step_and_rows_that_are_loaded_meanwhile():
    (world,) = in_world(1, lambda world: world)
    head = head_of(world, sample_rate=0.1)
    one_step(head, world)
    feat_BD = torch.randn(G, D).requires_grad_()
    head(feat_BD, torch.arange(G)).backward()  # its rows are known before the snapshot is taken
    expected, within = rows_of(taken(head, world)), taken(head, world, behind=True)
    head.step(0.05)
    within.tables[""].copying.finish()
    assert same_rows(rows_of(within), expected)

    expected, behind = rows_of(taken(head, world)), taken(head, world, behind=True)
    head.store.load_row_state({name: torch.ones_like(t) for name, t in head.row_state().items()})
    behind.tables[""].copying.finish()
    assert same_rows(rows_of(behind), expected)


def test_a_copy_without_memory_is_given_up_and_training_goes_on(monkeypatch, tmp_path, caplog):
    """... where the second chunk is refused; where the first allocation is, the checkpoint is written at once."""
    monkeypatch.setattr(logging.getLogger("partial_fc"), "propagate", True)
    (world,) = in_world(1, lambda world: world)
    head, undisturbed = head_of(world, sample_rate=1.0), head_of(world, sample_rate=1.0)
    saver = checkpoint.Saver(tmp_path, world, keep=2)
    copy, calls = copying.RowCopy._copy, []

    def refused(self, row_K):
        calls.append(row_K)
        if len(calls) == 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:129] DefaultCPUAllocator: can't allocate memory")
        copy(self, row_K)

    for problem in ("a chunk", "all", None):
        one_step(head, world)
        one_step(undisturbed, world)
        with monkeypatch.context() as patch:
            patch.setattr(copying, "_CHUNK_BYTES", 500)
            if problem == "a chunk":
                patch.setattr(copying.RowCopy, "_copy", refused)
            elif problem == "all":
                patch.setattr(torch.Tensor, "new_empty", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
            snapshot = taken(head, world, behind=True)
            patch.undo() if problem == "all" else None
            assert snapshot.is_copy == (problem != "all")
            saver.begin(snapshot)
            assert one_step(head, world) == one_step(undisturbed, world)
            saver.finish()
        assert saver.last_failed == (problem == "a chunk")
    saver.close()
    assert len(folders.complete(tmp_path)) == 2
    assert "no memory for a copy of this rank's 0.1 MB: no memory. More processes" in caplog.text
