"""Checkpoints that earlier versions wrote, and those of heads without rows.

checkpoint_format_4/ was written by commit 6d1903e, by two ranks: 11 classes with two centres each, of which class 2 was
never created; bfloat16 centres, float32 state.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from partial_fc import checkpoint
from partial_fc.comm import SingleWorld
from partial_fc.head import CrossEntropy, HardNegatives, PartialFC, Storage
from partial_fc.verbs.checkpoint.reshard import ReshardOptions, reshard
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.unit.stored_checkpoints import OneOf, heads_of, whole

STORED = Path(__file__).parents[1] / "checkpoint_format_4"
CREATED = [0, 1, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.fixture(params=[3, 4])
def folder(request, tmp_path) -> Path:
    """The stored one, and what it was in format 3: no checksums, no running statistics of the ranks."""
    copy = shutil.copytree(STORED, tmp_path / "step-00000007")
    if request.param == 3:
        for path in copy.glob("rank-*"):
            path.unlink()
        manifest = json.loads((copy / "manifest.json").read_text())
        (copy / "manifest.json").write_text(json.dumps({**manifest, "format": 3}))
        (copy / "COMPLETE").write_text("")
    return copy


def heads(size: int) -> list[PartialFC]:
    options = {"storage": Storage(torch.bfloat16, torch.float32), "sub_centres": 2, "sample_rate": 0.5}
    return [heads_of(size, made=(2, 5), hard_negatives=HardNegatives(11, 2), **options)[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("resharded", [False, True])
def test_the_rows_of_earlier_versions_are_read_bit_for_bit(tmp_path, folder, size, resharded):
    files = [load_file(path) for path in sorted(STORED.glob("head-*-classes-*"))]
    expected = {name: torch.cat([file[name] for file in files]) for name in ("centres", "momentum", "touched")}
    if resharded:
        reshard(ReshardOptions((folder,), tmp_path / "out", 3))
        folder = tmp_path / "out"
    assert verify(VerifyOptions((folder,))) == 0
    read, loaded = checkpoint.Checkpoint(folder), heads(size)
    for head in loaded:
        notes = read.load_head(head)
        ranks = read.manifest["world_size"]
        assert bool(notes) == (size != ranks or resharded), notes
        assert head.num_steps == 7
        assert size != 2 or resharded or all(int(t.min()) == 3 + head.world.rank for t in lists(head))
    rows = whole(loaded)
    for name, t in expected.items():
        assert rows[name].dtype == t.dtype
        assert torch.equal(rows[name][CREATED], t), name
        assert not rows[name][2].any(), "class 2, which was never created"
    created = torch.cat([head.rows.created(head.rows.start, head.rows.stop) for head in loaded])
    assert created.nonzero().flatten().tolist() == CREATED


def lists(head: PartialFC) -> list[torch.Tensor]:
    assert head.hard_negatives is not None
    return list(head.hard_negatives.state().values())


def test_all_else_of_earlier_versions_is_read():
    read = checkpoint.Checkpoint(STORED)
    assert (read.step, read.manifest["position"], read.manifest["score"]) == (7, 70, 0.9)
    assert read.class_names == [f"n{i}" for i in range(11)]
    assert torch.equal(read.backbone()["w"], torch.arange(3.0))
    assert torch.equal(read.optimizer()["w/momentum_buffer"], torch.ones(3))
    assert any(name.startswith("exchange/") for name in read.local(1)), "of a compression that has left"
    assert {name: t.tolist() for name, t in read.buffers(OneOf(1, 2)).items()} == {"n": [6.0]}


NO_ROWS = CrossEntropy(3)


def taken(world, step: int) -> checkpoint.Snapshot:
    return checkpoint.capture(
        step, {"w": torch.ones(3) * step}, {}, {"buffer/n": torch.ones(1)}, NO_ROWS, {}, world=world
    )


def test_a_head_without_rows_has_no_part_of_a_checkpoint(tmp_path):
    world = SingleWorld()
    saver = checkpoint.Saver(tmp_path, world, keep=1)
    saver.begin(taken(world, 3))
    saver.finish()
    saver.close()
    (folder,) = tmp_path.glob("step-*")
    assert not list(folder.glob("head-*"))
    read = checkpoint.Checkpoint(folder)
    assert read.manifest == {"format": 4, "step": 3, "world_size": 1}
    assert read.load_head(NO_ROWS) == []
    assert read.buffers(world)["n"].tolist() == [1.0]
    assert verify(VerifyOptions((folder,))) == 0
