"""`partial-fc checkpoint inspect | verify | reshard`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from partial_fc import checkpoint
from partial_fc.checkpoint.files import read_checksums, save_tensors, write_checksums
from partial_fc.checkpoint.head_state import facts_of
from partial_fc.checkpoint.output import new_checkpoint
from partial_fc.head import PartialFC, Storage
from partial_fc.verbs.checkpoint.inspect import InspectOptions, inspect
from partial_fc.verbs.checkpoint.reshard import ReshardOptions, reshard
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.running import change_manifest
from tests.unit.stored_checkpoints import D, OneOf, damage, heads_of, save, whole


def loaded(folder: Path, size: int, **options) -> list[PartialFC]:
    """By so many ranks, whose rows were others before."""
    heads = heads_of(size, made=(1, 5, 6), **options)
    for head in heads:
        checkpoint.Checkpoint(folder).load_head(head)
    return heads


@pytest.mark.parametrize(("before", "after"), [(3, 1), (8, 3), (2, 13)])
@pytest.mark.parametrize("made", [None, (), (0, 5, 10)])
def test_resharded_rows_are_the_same_bit_for_bit(tmp_path, monkeypatch, before, after, made):
    """In files of at most two classes, with three centres each, of mixed dtypes."""
    options = {"storage": Storage(torch.bfloat16, torch.float32), "sub_centres": 3}
    monkeypatch.setattr("partial_fc.checkpoint.rows.PART_BYTES", 2 * 3 * (D * (2 + 4) + 4))
    heads = heads_of(before, made=made, **options)
    save(tmp_path / "a", heads, names=[f"n{i}" for i in range(11)])
    reshard(ReshardOptions((tmp_path / "a",), tmp_path / "b", after))
    files = sorted((tmp_path / "b").glob("head-*"))
    assert all(f"-of-{after:05d}-" in path.name for path in files)
    again = loaded(tmp_path / "b", after, **options)
    for name, tensor in whole(again).items():
        assert torch.equal(tensor, whole(heads)[name]), name
    # Classes that were never made still are not.
    assert torch.equal(*(torch.cat([h.rows.created(h.rows.start, h.rows.stop) for h in hs]) for hs in (heads, again)))
    assert verify(VerifyOptions((tmp_path / "b",))) == 0
    assert checkpoint.Checkpoint(tmp_path / "b").class_names == [f"n{i}" for i in range(11)]


def test_folders_of_several_hosts_become_one(tmp_path):
    heads = heads_of(3)
    first, second = save(tmp_path / "a", heads, hosts=[[0, 2], [1]])
    with pytest.raises(ValueError, match=r"no file holds classes 4 to 7.*folders of all of them"):
        reshard(ReshardOptions((first,), tmp_path / "b", 1))
    assert not (tmp_path / "b").exists()
    reshard(ReshardOptions((first, second), tmp_path / "b", 1))
    reshard(ReshardOptions((second, first), tmp_path / "c", 3))
    for folder, size in ((tmp_path / "b", 1), (tmp_path / "c", 3)):
        for name, tensor in whole(loaded(folder, size)).items():
            assert torch.equal(tensor, whole(heads)[name]), name
    assert verify(VerifyOptions((tmp_path / "c",))) == 0


def test_folders_of_two_checkpoints_are_refused(tmp_path):
    save(tmp_path / "a", heads_of(2))
    save(tmp_path / "b", heads_of(2), step=8)
    with pytest.raises(ValueError, match="not of one checkpoint: step 7 and 8"):
        reshard(ReshardOptions((tmp_path / "a", tmp_path / "b"), tmp_path / "c", 1))


def own(value: float) -> dict[str, torch.Tensor]:
    return {"buffer/n": torch.full((1,), value)}


def test_running_statistics_of_ranks_go_to_as_many_only(tmp_path, capsys):
    save(tmp_path / "a", heads_of(3), local=[own(1.0), own(2.0), own(6.0)])
    reshard(ReshardOptions((tmp_path / "a",), tmp_path / "b", 2))
    assert "running statistics are left out" in capsys.readouterr().out
    found = checkpoint.Checkpoint(tmp_path / "b")
    assert [found.local(rank) for rank in range(2)] == [{}, {}]
    reshard(ReshardOptions((tmp_path / "a",), tmp_path / "c", 3))
    again = checkpoint.Checkpoint(tmp_path / "c").buffers(OneOf(2, 3))
    assert {name: t.tolist() for name, t in again.items()} == {"n": [6.0]}


def test_a_damaged_file_is_not_given_a_new_checksum(tmp_path):
    save(tmp_path / "a", heads_of(2))
    path = next((tmp_path / "a").glob("head-00001-*"))
    damage(path)
    with pytest.raises(ValueError, match=rf"{path.name} is damaged"):
        reshard(ReshardOptions((tmp_path / "a",), tmp_path / "b", 1))
    assert not (tmp_path / "b").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/mine").write_text("x")
    with pytest.raises(ValueError, match="is there already"):
        reshard(ReshardOptions((tmp_path / "a",), tmp_path / "b", 1))
    assert (tmp_path / "b/mine").read_text() == "x"


# ---- verify


def one(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[0]


@pytest.mark.parametrize(
    "name",
    ["backbone.safetensors", "class-names.txt", "head-00001-*", "rank-00002-of-00003.safetensors", "manifest.json"],
)
def test_each_file_that_is_damaged_or_missing_is_named(tmp_path, capsys, name):
    save(tmp_path / "a", heads_of(3), names=list("abcdefghijk"), local=[own(1.0)] * 3)
    path = one(tmp_path / "a", name)
    damage(path)
    assert verify(VerifyOptions((tmp_path / "a",))) == 1
    assert f"bad: {path} is damaged" in capsys.readouterr().out
    path.unlink()
    assert verify(VerifyOptions((tmp_path / "a",))) == 1
    assert f"bad: {path} is missing" in capsys.readouterr().out


def test_what_checksums_cannot_see_is_found(tmp_path, capsys):
    def problems(change) -> str:
        folder = tmp_path / f"a{len(list(tmp_path.iterdir()))}"
        save(folder, heads_of(2, made=(0, 3, 6)))
        change(folder)
        assert verify(VerifyOptions((folder,))) == 1
        return capsys.readouterr().out

    def head(change, rank=0):
        """Another content, with its right checksum: what only a look at the content can find."""

        def do(folder):
            path = one(folder, f"head-0000{rank}-*")
            tensors = load_file(path)
            change(tensors)
            digest = save_tensors(tensors, path)
            for sums in folder.glob("rank-*.sha256"):
                if path.name in read_checksums(sums):
                    write_checksums({**read_checksums(sums), path.name: digest}, sums)

        return do

    assert "do not ascend" in problems(head(lambda t: t["class"].copy_(t["class"].flip(0))))
    assert "momentum has shape (1, 6); expected 2 rows" in problems(
        head(lambda t: t.update(momentum=t["momentum"][:1].clone()))
    )
    assert "centres is torch.float32 (6,) a class; it is torch.float32 (5,) a class in head-00000" in problems(
        head(lambda t: t.update(centres=t["centres"][:, :5].contiguous()))
    )
    assert "momentum is not there" in problems(head(lambda t: t.pop("momentum"), rank=1))
    table = facts_of(heads_of(1)[0])["tables"][""] | {"num_classes": 12}
    assert "no file holds classes 11 to 11" in problems(
        lambda folder: change_manifest(folder, lambda manifest: manifest | {"tables": {"": table}})
    )
    assert "says 'x'; expected step 7" in problems(lambda folder: (folder / "COMPLETE").write_text("x"))
    assert "has no file COMPLETE" in problems(lambda folder: (folder / "COMPLETE").unlink())
    twice = "head-00000-of-00002-classes-000000000002-000000000004.safetensors"
    assert "holds classes from 2; another one" in problems(lambda folder: (folder / twice).write_bytes(b"x"))


def test_a_host_folder_is_checked_for_its_ranks(tmp_path, capsys):
    first, second = save(tmp_path / "a", heads_of(3), hosts=[[0, 2], [1]])
    assert verify(VerifyOptions((first,))) == 0
    assert "ranks [0, 2] of 3" in capsys.readouterr().out
    assert verify(VerifyOptions((first, second))) == 0
    assert "note" not in capsys.readouterr().out
    one(first, "head-00002-*").unlink()
    assert verify(VerifyOptions((first,))) == 1
    assert f"bad: {first}: no file holds classes 8 to 10" in capsys.readouterr().out


# ---- inspect


def test_inspect_says_what_there_is(tmp_path, capsys):
    save(tmp_path / "step-00000007", heads_of(3, made=range(8)), names=list("abcdefghijk"), score=0.9)
    save(tmp_path / "step-00000008", heads_of(2), step=8, score=0.5)
    save(tmp_path / "step-00000009", heads_of(2), step=9)
    (tmp_path / "step-00000009/COMPLETE").unlink()
    assert inspect(InspectOptions(tmp_path)) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("11 classes  score 0.90000  best")
    assert second.endswith("score 0.50000  newest")
    assert "incomplete" in third
    damage(tmp_path / "step-00000008/manifest.json")
    inspect(InspectOptions(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step-00000008 ") and "damaged" in line for line in lines)
    assert inspect(InspectOptions(tmp_path / "step-00000007")) == 0
    printed = capsys.readouterr().out
    words = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert (words["step"], words["position"], words["world_size"]) == ("7", "70", "3")
    assert (words["head.classes_created"], words["head.classes_touched"]) == ("8", "7")
    assert "centres (6,) float32, momentum (6,) float32, touched" in words["head.columns"]
    assert inspect(InspectOptions(tmp_path / "step-00000009")) == 1


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        inspect(InspectOptions(tmp_path))
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        reshard(ReshardOptions((tmp_path,), tmp_path / "b", 1))


def test_checkpoints_without_a_head_are_looked_at_too(tmp_path, capsys):
    """Those of recipe mnist."""
    manifest = {"step": 3, "world_size": 1, "best": {"test": 0.97}, "position": 70, "tables": {}, "head": {}}
    with new_checkpoint(tmp_path / "a", manifest, None, "made by hand") as output:
        for name in ("backbone.safetensors", "optimizer.safetensors"):
            output.tensors(name, {"w": torch.ones(3)})
    assert verify(VerifyOptions((tmp_path / "a",))) == 0
    assert inspect(InspectOptions(tmp_path / "a")) == 0
    assert ["best", "test", "0.97"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    with pytest.raises(ValueError, match="has no class centres: it is not of recipe face"):
        reshard(ReshardOptions((tmp_path / "a",), tmp_path / "b", 1))
