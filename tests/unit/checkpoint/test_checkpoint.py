"""Checkpoints: whole or not there, readable by any number of ranks, older ones removed."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.peak_memory import PeakMemory
from partial_fc import checkpoint
from partial_fc.checkpoint.folders import newest
from partial_fc.checkpoint.read import Damaged
from partial_fc.head import AdaFace, CosFace, CrossEntropy, CurricularFace, HardNegatives, PartialFC, Storage
from partial_fc.head.rows import RowAdagrad
from tests.flat import flat_head
from tests.unit.stored_checkpoints import D, OneOf, whole


def head_of(rank: int, size: int, num_classes: int = 11, seed: int = 0, **options) -> PartialFC:
    return flat_head(num_classes, D, CosFace(), world=OneOf(rank, size), seed=seed, **options)


def touch(head: PartialFC, classes) -> None:
    """Makes the rows of these classes of the head's and fills them and their state, whatever rank holds them."""
    class_M = torch.tensor([c for c in classes if head.shard.start <= c < head.shard.stop], dtype=torch.int64)
    rows = {name: t[:1].new_zeros(len(class_M), *t.shape[1:]) for name, t in head.row_state().items()}
    for name, tensor in rows.items():
        value_M = class_M + 1 + 100 * len(name)
        tensor.copy_(value_M.view(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape))
    head.rows.write(head.shard.start, head.shard.stop, class_M, rows)


def save(root, step, heads, keep=2, copy=True, **facts):
    """Every rank's part, one after the other: each believes itself alone in its folder, and leads there."""
    for head in heads:
        saver = checkpoint.Saver(root, head.world, keep)
        saver.begin(checkpoint.capture(step, {"w": torch.ones(2)}, {}, {}, head, facts, world=head.world, copy=copy))
        saver.finish()
        saver.close()
    return checkpoint.newest(root)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 3), (3, 1), (3, 2), (2, 5), (8, 3)])
@pytest.mark.parametrize("sub_centres", [1, 3])
@pytest.mark.parametrize(("touched", "num_files"), [((), 1), ((0, 5, 10), 1), (range(3, 9), 2), (range(11), 3)])
def test_only_rows_that_exist_are_stored(tmp_path, monkeypatch, saved_by, loaded_by, sub_centres, touched, num_files):
    """In files of at most five classes; also over rows that whoever loads had made already."""
    options = {"storage": Storage(torch.bfloat16, torch.float32), "sub_centres": sub_centres}
    monkeypatch.setattr("partial_fc.checkpoint.rows.PART_BYTES", 5 * sub_centres * (D * (2 + 4) + 4))
    heads = [head_of(rank, saved_by, **options) for rank in range(saved_by)]
    for head in heads:
        touch(head, touched)
    folder = save(tmp_path, 3, heads)
    files = sorted(folder.glob("head-*"))
    assert len(files) == num_files if saved_by == 1 else len(files) >= saved_by
    stored = [load_file(path) for path in files]
    assert sum(len(part["centres"]) for part in stored) == len(touched)
    assert all(part["centres"].dtype == torch.bfloat16 and len(part["centres"]) <= 5 for part in stored)
    others = [head_of(rank, loaded_by, seed=99, **options) for rank in range(loaded_by)]
    for other in others:
        touch(other, (1, 5, 6))
        assert checkpoint.Checkpoint(folder).load_head(other) == []
    for name, tensor in whole(others).items():
        assert torch.equal(tensor, whole(heads)[name]), name
    # Those that were never made start as they would have without the checkpoint: by the first run's seed.
    assert torch.equal(*(torch.cat([h.centres for h in hs]) for hs in (heads, others)))


def test_files_of_an_earlier_try_are_not_taken_for_this_ones(tmp_path, monkeypatch):
    head = head_of(0, 1)
    touch(head, range(11))
    monkeypatch.setattr("partial_fc.checkpoint.rows.PART_BYTES", 100)  # one class a file
    for size in (1, 2):  # as many ranks as now, and others
        save(tmp_path, 3, [head_of(rank, size) for rank in range(size)])
    monkeypatch.undo()
    folder = save(tmp_path, 3, [head])
    again = head_of(0, 1)
    checkpoint.Checkpoint(folder).load_head(again)
    for name, tensor in head.row_state().items():
        assert torch.equal(again.row_state()[name], tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "every"), [pytest.param("device", 1, marks=pytest.mark.long), ("device", 100)])
def test_memory_of_saving_and_loading_is_that_of_one_file(tmp_path, monkeypatch, place, every):
    """A shard of 200 MB, of which every row or every 100th was made, in files of 4 MB."""
    monkeypatch.setattr("partial_fc.checkpoint.rows.PART_BYTES", 4 << 20)
    num_classes, width = 100_000, 256
    heads = []
    for name in ("saved", "loaded"):
        head = PartialFC(num_classes, width, CosFace(), storage=Storage(place=place))
        for class_M in torch.arange(0, num_classes, every).split(10_000):
            rows = {name: torch.ones(len(class_M), t.shape[1]) for name, t in head.row_state().items()}
            head.rows.write(int(class_M[0]), int(class_M[-1]) + 1, class_M, rows)
        heads.append(head)
    saved, loaded = heads

    memory = PeakMemory(torch.device("cpu"))
    folder = save(tmp_path / "checkpoints", 1, [saved], copy=False)
    saving_bytes = memory.added_bytes()
    for rows in loaded.row_state().values():
        rows[::every] = 0  # not all of it: its memory is there before, and no part of what loading adds
    memory = PeakMemory(torch.device("cpu"))
    checkpoint.Checkpoint(folder).load_head(loaded)
    loading_bytes = memory.added_bytes()
    assert saving_bytes < 20 << 20
    assert loading_bytes < 20 << 20
    row_bytes = 2 * 4 * width + 4 + 8
    stored_bytes = sum(path.stat().st_size for path in folder.glob("head-*"))
    assert stored_bytes < 1.02 * row_bytes * num_classes / every
    for name, rows in loaded.row_state().items():
        assert bool((rows[::every] == 1).all()), name
    for head in heads:
        head.close()


def test_a_root_that_cannot_be_looked_into_is_no_empty_one(tmp_path, monkeypatch):
    """A lost network mount: a run would begin anew beside its checkpoints."""

    def gone(path: Path) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    assert newest(tmp_path / "none") is None
    monkeypatch.setattr(os, "listdir", gone)
    with pytest.raises(OSError, match="Stale file handle"):
        newest(tmp_path)


def test_older_ones_are_removed_and_what_a_killed_run_left_of_them(tmp_path):
    """A later one that is not complete stays: somebody may be writing it."""
    for name in ("step-00000001", "step-00000031", "step-of-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "backbone.safetensors").write_text("")
    for step in (10, 20, 9, 30):
        save(tmp_path, step, [head_of(0, 1)], keep=2)
    left = sorted(folder.name for folder in tmp_path.iterdir())
    assert left == ["step-00000020", "step-00000030", "step-00000031", "step-of-mine"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_classes": 12}, "num_classes 11; this run has 12"),
        ({"sub_centres": 2}, "sub_centres 1; this run has 2"),
        ({"optimizer": RowAdagrad()}, r"momentum is .*RowAdagrad"),
    ],
)
def test_another_head_is_refused(tmp_path, other, words):
    folder = save(tmp_path, 1, [head_of(0, 1)])
    with pytest.raises(ValueError, match=words):
        checkpoint.Checkpoint(folder).load_head(head_of(0, 1, **other))


def test_what_a_margin_remembers_comes_back_unless_it_is_another_margin(tmp_path):
    def adaptive(margin) -> PartialFC:
        return PartialFC(11, D, margin)

    head = adaptive(AdaFace())
    head(torch.randn(4, D, generator=torch.Generator().manual_seed(0)).requires_grad_(), torch.arange(4))
    assert head.margin_state != AdaFace().state()
    found = checkpoint.Checkpoint(save(tmp_path, 1, [head]))
    same, other = adaptive(AdaFace()), adaptive(CurricularFace())
    assert found.load_head(same) == []
    assert same.margin_state == head.margin_state
    (note,) = found.load_head(other)
    assert "another margin" in note
    assert other.margin_state == CurricularFace().state()


def test_lists_of_hard_negatives_come_back_to_as_many_ranks(tmp_path):
    def with_lists(rank: int, size: int, k: int = 2) -> PartialFC:
        return head_of(rank, size, sample_rate=0.5, hard_negatives=HardNegatives(11, k))

    heads = [with_lists(rank, 2) for rank in range(2)]
    for rank, head in enumerate(heads):
        for tensor in head.hard_negatives.state().values():
            tensor.fill_(3 + rank)
    folder = save(tmp_path, 1, heads)
    found = checkpoint.Checkpoint(folder)
    for rank in range(2):
        again = with_lists(rank, 2)
        assert found.load_head(again) == []
        assert all(bool((t == 3 + rank).all()) for t in again.hard_negatives.state().values())
    for other, reason in ((with_lists(0, 1), "2 ranks, this run 1"), (with_lists(0, 2, k=3), "2 hard neg")):
        (note,) = found.load_head(other)
        assert "start empty" in note
        assert reason in note
        assert all(bool((t == -1).all()) for t in other.hard_negatives.state().values())
    assert found.load_head(head_of(0, 2)) == []  # who wants none, misses none
    (folder / "head-00001-of-00002-hard-negatives.safetensors").unlink()
    with pytest.raises(ValueError, match=r"head-00001-of-00002-hard-negatives\.safetensors is missing"):
        found.load_head(with_lists(1, 2))


@pytest.mark.parametrize("text", ["", "x", "{}", '{"step": 2, "ranks": [0]}', '{"step": 1, "ranks": []}'])
def test_the_marker_has_to_say_of_what_it_is(tmp_path, text):
    folder = save(tmp_path, 1, [head_of(0, 1)])
    (folder / "COMPLETE").write_text(text)
    with pytest.raises(Damaged, match=r"COMPLETE says .* expected step 1 and ranks below 1"):
        checkpoint.Checkpoint(folder)


def test_facts_come_back_and_nan_is_null(tmp_path):
    folder = save(tmp_path, 4, [head_of(0, 1)], position=123, best={"lfw": 0.5, "none": float("nan")})
    found = checkpoint.Checkpoint(folder)
    assert (found.step, found.manifest["position"]) == (4, 123)
    assert found.manifest["best"] == {"lfw": 0.5, "none": None}
    assert torch.equal(found.backbone()["w"], torch.ones(2))


def test_a_head_without_rows_has_no_part_of_a_checkpoint(tmp_path):
    head = CrossEntropy(3)
    head.world = OneOf(0, 1)
    folder = save(tmp_path, 3, [head])
    assert not list(folder.glob("head-*"))
    read = checkpoint.Checkpoint(folder)
    assert read.manifest == {"format": 5, "step": 3, "world_size": 1, "tables": {}, "head": {}}
    assert read.load_head(head) == []
