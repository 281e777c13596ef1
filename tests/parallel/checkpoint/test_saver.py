"""All ranks save together, into one folder or into one each, and go on from the same checkpoint."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from partial_fc import checkpoint
from partial_fc.checkpoint.consistency import newest_common
from partial_fc.checkpoint.saver import ranks_beside
from partial_fc.comm import all_gather_json
from partial_fc.head import CosFace, PartialFC
from partial_fc.train.guards.signals import StepVote, Votes


@pytest.fixture(params=["shared", "one each"])
def root(request, world, tmp_path_factory):
    """A folder that all ranks see, or one of its own for each."""
    own_W = all_gather_json(str(tmp_path_factory.mktemp("own")), world, "t/root")
    return Path(own_W[0 if request.param == "shared" else world.rank]) / "checkpoints"


def filled(world, value: float) -> PartialFC:
    head = PartialFC(11, 6, CosFace(), world=world)
    for name, rows in head.row_state().items():
        rows.fill_(value + len(name))
    head.store.exists_L.fill_(True)
    head.store._num_missing = 0
    return head


def taken(world, step: int) -> checkpoint.Snapshot:
    return checkpoint.capture(
        step, {"w": torch.ones(3)}, {}, {"buffer/b": torch.ones(2) * world.rank}, filled(world, step), {}, world=world
    )


def test_all_save_and_load(world, root):
    saver = checkpoint.Saver(root, world, keep=1)
    for step in (3, 4):
        saver.begin(taken(world, step))
        saver.finish()
    saver.close()
    folder = newest_common(root, world)
    assert folder == root / "step-00000004"
    ranks = json.loads((folder / "COMPLETE").read_text())["ranks"]
    assert ranks == ranks_beside(root, world)
    assert world.rank in ranks
    found = checkpoint.Checkpoint(folder)
    again = PartialFC(11, 6, CosFace(), world=world)
    found.load_head(again)
    for name, rows in filled(world, 4).row_state().items():
        assert torch.equal(again.row_state()[name], rows)
    assert found.buffers(world)["b"].tolist() == [world.rank] * 2
    assert torch.equal(found.backbone()["w"], torch.ones(3))


@pytest.mark.parametrize("begins", [True, False])
def test_one_that_a_rank_cannot_write_counts_nowhere(world, root, begins, caplog, monkeypatch):
    saver = checkpoint.Saver(root, world, keep=1)
    saver.begin(taken(world, 3))
    saver.finish()
    last = world.size - 1
    failing = last if begins else 0

    def unmark(folder):
        raise OSError(errno.EISDIR, "Is a directory", str(folder / "COMPLETE"))

    if world.rank == failing and begins:  # in the way of its list of checksums
        (root / f"step-00000004/rank-{last:05d}-of-{world.size:05d}.sha256").mkdir(parents=True)
    elif world.rank == failing:
        monkeypatch.setattr("partial_fc.checkpoint.saver.unmark", unmark)
    saver.begin(taken(world, 4))
    assert saver.under_way == begins
    saver.finish()
    assert saver.last_failed
    assert newest_common(root, world) == root / "step-00000003"
    assert begins or not (root / "step-00000004").exists()
    why = "Is a directory" if world.rank == failing else "another rank could not write"
    assert world.rank not in (0, failing) or f"not written on rank {world.rank}: {why}" in caplog.text
    saver.close()


def test_only_what_all_have_is_gone_on_from(world, tmp_path):
    if world.size == 1:
        pytest.skip("needs two ranks")
    for step in (3, 5) if world.rank == 0 else (3, 4):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        (folder / "COMPLETE").write_text("")
    assert newest_common(tmp_path, world) == tmp_path / "step-00000003"
    if world.rank == 0:
        (tmp_path / "step-00000003/COMPLETE").unlink()
    with pytest.raises(ValueError, match="rank 0 step 5, rank 1 step 3 4"):
        newest_common(tmp_path, world)


def test_a_disk_that_cannot_be_looked_at_is_an_error_on_all(world, tmp_path, monkeypatch):
    last = world.size - 1

    def complete(root):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(root))

    if world.rank == last:
        monkeypatch.setattr("partial_fc.checkpoint.consistency.complete", complete)
    with pytest.raises(ValueError, match=f"{f'rank {last} ' if last else ''}cannot look for checkpoints below"):
        newest_common(tmp_path, world)


def test_what_one_rank_says_all_know(world):
    vote = StepVote(world)
    last = world.rank == world.size - 1

    class Says:
        busy, failed, lost = last, world.rank == 0, None

    vote.start(False, Says)
    assert vote.result() == Votes(stop=False, busy=True, failed=True)
    vote.start(last, type("Says", (), {"busy": False, "failed": False, "lost": None}))
    assert vote.result() == Votes(stop=True, busy=False, failed=False)
