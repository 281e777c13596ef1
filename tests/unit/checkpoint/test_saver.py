"""Checkpoints on their way to the disk: what counts when, what is left after a failure, what is kept."""

import errno
import json
import shutil
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from partial_fc import checkpoint
from partial_fc.checkpoint.files import save_tensors, sha256
from partial_fc.checkpoint.folders import prune
from partial_fc.checkpoint.lock import LostLock, _text, acquire
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC
from tests.unit.full_disk import full_disk


@pytest.fixture
def head() -> PartialFC:
    made = PartialFC(11, 6, CosFace())
    assert len(made.centres) == 11
    return made


@pytest.fixture
def saver(tmp_path):
    made = checkpoint.Saver(tmp_path / "checkpoints", SingleWorld(), keep=2)
    yield made
    made.close()


def snapshot(head: PartialFC, step: int, score: float | None = None, **more) -> checkpoint.Snapshot:
    return checkpoint.capture(step, {"w": torch.ones(1000)}, {}, {}, head, {"score": score}, world=head.world, **more)


def save(saver: checkpoint.Saver, head: PartialFC, step: int, **more) -> None:
    saver.begin(snapshot(head, step, **more))
    saver.finish()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_our_files_are_read_by_the_library(tmp_path, dtype):
    odd = torch.arange(15).view(3, 5).to(dtype)
    tensors = {"odd": odd, "turned": odd.T, "none": odd[:0], "scalar": odd[2, 2], "b": torch.tensor([True])}
    digest = save_tensors(tensors, tmp_path / "x.safetensors", {"what": "ü"})
    assert digest == sha256(tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, t in tensors.items():
        assert found[name].dtype == t.dtype
        assert torch.equal(found[name], t)


def test_checksums_are_those_of_coreutils_and_cover_every_file(saver, head):
    save(saver, head, 7, class_names=[f"person {i}" for i in range(11)])
    folder = saver.root / "step-00000007"
    subprocess.run(["sha256sum", "--strict", "-c", "rank-00000-of-00001.sha256"], cwd=folder, check=True)
    listed = {line.split()[1] for line in (folder / "rank-00000-of-00001.sha256").read_text().splitlines()}
    assert {path.name for path in folder.iterdir()} == listed | {"COMPLETE", "rank-00000-of-00001.sha256"}
    assert json.loads((folder / "COMPLETE").read_text()) == {"step": 7, "ranks": [0]}
    assert checkpoint.Checkpoint(folder).class_names == [f"person {i}" for i in range(11)]


def test_it_counts_when_all_have_written_and_is_marked_once(saver, head):
    saver.begin(snapshot(head, 3))
    saver.poll(any_busy=True, any_failed=False)
    saver._wait()
    assert saver.under_way
    assert checkpoint.newest(saver.root) is None  # others may still write
    saver.poll(any_busy=False, any_failed=False)
    saver._wait()
    assert checkpoint.newest(saver.root) == saver.root / "step-00000003"
    assert saver.under_way  # until all have marked it
    saver.poll(any_busy=False, any_failed=False)
    assert not saver.under_way


@pytest.mark.parametrize("copy", [True, False])
def test_what_cannot_be_written_is_said_and_removed_and_the_one_before_stands(saver, head, copy, caplog):
    save(saver, head, 3)
    with full_disk(1000):
        save(saver, head, 4, copy=copy)
    assert saver.last_failed
    assert "the checkpoint of step 4 was not written on rank 0: File too large" in caplog.text
    assert "backbone.safetensors" in caplog.text
    assert "step-00000003" in caplog.text
    assert list((saver.root / "step-00000004").iterdir()) == []
    assert checkpoint.newest(saver.root) == saver.root / "step-00000003"
    assert torch.equal(checkpoint.Checkpoint(saver.root / "step-00000003").backbone()["w"], torch.ones(1000))


def test_who_was_cut_off_leaves_the_checkpoint_of_the_others_alone(tmp_path, head):
    """... of the same step, by another number of ranks, in the folder that is not its run's any more."""
    whole = {f"rank-0000{rank}-of-00002.sha256": "of the others" for rank in range(2)} | {"manifest.json": "theirs"}
    for name, text in whole.items():
        (tmp_path / name).write_text(text)

    def check() -> None:
        raise LostLock("another run's")

    with pytest.raises(LostLock):
        snapshot(head, 3).write(tmp_path, True, check)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == whole


@pytest.mark.parametrize("begun", [False, True])
def test_a_disk_that_is_gone_ends_no_training(saver, head, begun, caplog, monkeypatch):
    """A lost network mount: looking at a path raises, too."""

    def gone(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    save(saver, head, 3)
    if begun:
        saver.begin(snapshot(head, 4))
        saver._wait()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", gone)
        if begun:
            saver.poll(any_busy=False, any_failed=True)
        else:
            saver.begin(snapshot(head, 4))
    assert saver.last_failed
    assert not saver.under_way
    assert "the checkpoint of step 4 was not written on rank 0: Stale file handle" in caplog.text
    assert "step-00000003/COMPLETE" in caplog.text
    save(saver, head, 5)
    assert checkpoint.newest(saver.root) == saver.root / "step-00000005"


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file/below"):
        checkpoint.Saver(tmp_path / "file/below", SingleWorld(), keep=1)


def test_the_newest_and_the_best_are_kept(saver, head):
    for step, score in ((1, 0.5), (2, 0.9), (3, None), (4, 0.7), (5, None), (6, 0.9)):
        save(saver, head, step, score=score)
        saver._thread.submit(int).result()  # older ones have been removed
        kept = {2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [2, 4, 5], 6: [5, 6]}.get(step)
        assert kept is None or [int(f.name[5:]) for f in checkpoint.complete(saver.root)] == kept
    assert checkpoint.best(saver.root) == saver.root / "step-00000006"
    prune(saver.root, 1, keep_best=False)
    assert [f.name for f in saver.root.iterdir()] == ["step-00000006"]


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"score": "high"}'])
def test_copies_and_damaged_manifests_stand_in_nobodys_way(saver, head, manifest):
    save(saver, head, 1, score=0.9)
    first = saver.root / "step-00000001"
    copy = shutil.copytree(first, saver.root / "step-00000001.bak")
    (first / "manifest.json").unlink() if manifest is None else (first / "manifest.json").write_text(manifest)
    for step in (2, 3):
        save(saver, head, step, score=0.5)
    saver._thread.submit(int).result()  # older ones have been removed
    assert [f.name for f in checkpoint.complete(saver.root)] == ["step-00000002", "step-00000003"]
    assert not first.exists()
    assert (copy / "COMPLETE").exists()


def test_the_newest_is_that_of_the_most_steps_also_beyond_eight_digits(saver, head):
    for step in (99_999_999, 100_000_000):
        save(saver, head, step)
    assert checkpoint.newest(saver.root) == saver.root / "step-100000000"


def test_a_copy_that_does_not_fit_is_not_made_and_that_is_said_once(saver, head, monkeypatch, caplog):
    monkeypatch.setattr("partial_fc.checkpoint.saver.available_memory_bytes", lambda: 10_000)
    assert snapshot(head, 3, copy=saver.can_copy).is_copy
    monkeypatch.setattr("partial_fc.checkpoint.saver.available_memory_bytes", lambda: 8_500)  # the backbone has 4,000
    assert not saver.can_copy(6_000)
    assert not snapshot(head, 3, copy=saver.can_copy).is_copy
    assert caplog.text.count("training pauses while") == 1


def test_in_a_folder_that_is_another_run_s_nothing_is_marked_or_removed(tmp_path, head):
    """What was complete stays, and is not taken back, either."""
    owner, _ = acquire(tmp_path, "first")
    with closing(checkpoint.Saver(tmp_path, SingleWorld(), keep=1, lock=owner)) as saver:
        save(saver, head, 1)
        other = replace(owner.record, run="second")
        (tmp_path / "owner-1.json").write_bytes(_text(other, 0))
        for step in (1, 2):
            save(saver, head, step)
            assert saver.last_failed
            assert isinstance(saver.lost, LostLock)
    assert [folder.name for folder in checkpoint.complete(tmp_path)] == ["step-00000001"]
    owner.release()
