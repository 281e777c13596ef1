"""Which checkpoint a run goes on from where some are damaged, and what becomes of those."""

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from partial_fc import checkpoint, files
from partial_fc.checkpoint import folders
from partial_fc.checkpoint.folders import DAMAGED, prune, quarantine
from partial_fc.checkpoint.lock import FolderLock, LostLock, _text, acquire
from partial_fc.checkpoint.recovery import latest_valid
from partial_fc.train.resume import resume
from partial_fc.verbs.checkpoint.inspect import InspectOptions, inspect
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.running import change_manifest
from tests.unit.stored_checkpoints import damage
from tests.unit.thread_world import in_world
from tests.unit.train.test_face_start import config_of, parts_of, run_of, write


@pytest.fixture
def root(tmp_path):
    """Checkpoints of three steps."""
    write(tmp_path / "checkpoints", 10, 20, 30)
    return tmp_path / "checkpoints"


@pytest.fixture
def owner(root):
    owner, _ = acquire(root, "this")
    yield owner
    owner.release()


def go_on(root: Path, owner: FolderLock | None, size: int = 2, **more) -> list[int | str]:
    """The step that each rank goes on from, or what it is told."""

    def act(world) -> int | str:
        try:
            found = latest_valid(root, world, owner if world.rank == 0 else None, **more)
        except ValueError as error:
            return str(error)
        return found.step if found else -1

    return in_world(size, act)


def names(root: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-000000") for path in root.iterdir() if path.is_dir())


def file(root: Path, step: int, name: str) -> Path:
    (path,) = (root / folders.folder_name(step)).glob(name)
    return path


def test_damage_is_gone_past_and_said(root, owner, caplog):
    """What one rank of two reads alone, too; a second one of a name does not take the first one's."""
    damage(file(root, 30, "head-*"))
    file(root, 20, "manifest.json").write_text("{")
    (root / "step-00000020.damaged").mkdir()
    assert go_on(root, owner) == [10, 10]
    assert names(root) == ["10", "20.damaged", "20.damaged-2", "30.damaged"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "checkpoint of step 30: " in said[0]
    assert "safetensors is damaged: its SHA-256 is" in said[0]
    assert f"{root}/step-00000020 is now step-00000020.damaged-2; remove it" in said[3]
    assert said[4] == f"resuming from {root}/step-00000010; 20 step(s) that were trained are lost"
    assert go_on(root, owner) == [10, 10]
    assert len(said) == 5
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 5, "once"


def test_where_nothing_is_whole_all_stays_and_all_ranks_are_told_what_to_do(root, owner):
    for step in (10, 20, 30):
        file(root, step, "rank-*.sha256").unlink()
    one, two = go_on(root, owner)
    assert one == two
    assert f"no checkpoint below {root} is intact; none was renamed. step 30: " in one
    assert "Restore the files from a copy" in one
    assert names(root) == ["10", "20", "30"]
    assert go_on(root, owner, instead="a commit", after=25) == [-1, -1]
    assert names(root) == ["10", "20", "30.damaged"]


def unreadable(monkeypatch, *paths: Path, number: int = errno.EIO, times: int = 1_000_000) -> None:
    """The disk does not read these, so many times."""
    left = dict.fromkeys(map(str, paths), times)
    regular = files.regular

    def fail(path: Path, flags: int) -> int:
        if left.get(str(path), 0):
            left[str(path)] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return regular(path, flags)

    monkeypatch.setattr("partial_fc.checkpoint.recovery._RETRIES_S", (0.0, 0.0, 0.0))
    for module in ("partial_fc.files", "partial_fc.checkpoint.files", "partial_fc.checkpoint.folders"):
        monkeypatch.setattr(f"{module}.regular", fail)


@pytest.mark.parametrize("name", ["head-*", "backbone.*", "manifest.json", "rank-00000-*.sha256"])
def test_a_file_that_the_disk_does_not_read_is_damage(root, owner, monkeypatch, caplog, name):
    """A bad sector: the checkpoint before it is gone on from, as with any other damage."""
    bad = file(root, 30, name)
    unreadable(monkeypatch, bad)
    assert go_on(root, owner) == [20, 20]
    assert names(root) == ["10", "20", "30.damaged"]
    assert f"{bad} cannot be read (Input/output error), all beside it can" in caplog.text
    assert caplog.text.count("trying again") >= 3


def test_a_disk_that_reads_when_asked_again_has_no_damage(root, owner, monkeypatch):
    unreadable(monkeypatch, file(root, 30, "head-*"), times=2)
    assert go_on(root, owner) == [30, 30]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.ENOTCONN])
def test_a_folder_that_is_not_there_for_this_host_is_no_damage(root, owner, monkeypatch, number):
    unreadable(monkeypatch, file(root, 30, "head-*"), number=number)
    assert "That is no damage" in go_on(root, owner)[0]
    assert names(root) == ["10", "20", "30"]


@pytest.mark.parametrize("number", [4, 6])
def test_a_checkpoint_of_another_version_names_the_way_back(root, owner, number):
    """Its writer may come back: it is left as it is, and the run ends."""
    change_manifest(root / "step-00000030", lambda manifest: manifest | {"format": number})
    (said, _) = go_on(root, owner)
    assert f"format {number}; this version reads format 5" in said
    assert f"--resume {root}/step-00000020" in said
    assert names(root) == ["10", "20", "30"]


def test_an_error_of_the_disk_is_no_damage(root, owner, monkeypatch):
    """Of one rank of two: both end, and nothing is renamed, whatever else is damaged."""
    damage(file(root, 30, "head-*"))
    unreadable(monkeypatch, *(root / "step-00000030").iterdir())

    def sha256(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def act(world) -> str:
        with pytest.raises(ValueError) as raised:
            latest_valid(root, world, owner if world.rank == 0 else None)
        return str(raised.value)

    monkeypatch.setattr("partial_fc.checkpoint.read.sha256", sha256)
    said = in_world(2, act)
    assert said[0] == said[1]
    assert "rank 0 cannot read a checkpoint: Input/output error: " in said[0]
    assert "That is no damage, so nothing was renamed" in said[0]
    assert names(root) == ["10", "20", "30"]


def test_what_cannot_be_renamed_is_passed_over(root, owner, monkeypatch, caplog):
    damage(file(root, 30, "backbone.*"))

    def rename(self: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "rename", rename)
    assert go_on(root, owner) == [20, 20]
    assert names(root) == ["10", "20", "30"]
    assert f"{root}/step-00000030 cannot be renamed, and is skipped: Read-only file system" in caplog.text
    monkeypatch.undo()
    for last in (25, 31):  # the first one of this run, and the second; --keep-checkpoints 2
        write(root, last)
        prune(root, 2, keep_best=False, last=last)
    assert names(root) == ["30", "31"], "what is ahead of a run is not one of those that it keeps"


def test_nothing_is_renamed_where_the_folder_is_not_this_run_s(root, owner):
    damage(file(root, 30, "backbone.*"))
    owner._ended.set()
    (root / "owner-1.json").write_bytes(_text(replace(owner.record, run="second"), 0))
    with pytest.raises(LostLock):
        owner.check()
    one, two = go_on(root, owner)
    assert one == two
    assert f"{root} no longer belongs to this run" in one
    assert names(root) == ["10", "20", "30"]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_run_goes_back_where_it_is_told_to(root, owner, where):
    """To its own older checkpoint: the newer ones are set aside. To that of another run it starts from: refused."""
    write(root.parent / "elsewhere", 10)
    folder = (root if where == "here" else root.parent / "elsewhere") / "step-00000010"
    damage(file(root, 30, "backbone.*"))  # which need not be whole
    config = config_of(root.parent, resume=folder)

    def act(world) -> float:
        run = run_of(world, config)
        if world.rank == 0:
            run.folders.locks[root] = owner
        backbone, head = parts_of(world)
        if where == "elsewhere":
            with pytest.raises(ValueError, match="step-00000030 is ahead of where this run would start"):
                resume(run, backbone, head)
            return 0.0
        start = resume(run, backbone, head)
        assert start is not None
        assert start.state.step == 10
        return backbone.module.weight[0, 0].item()

    assert in_world(2, act) == [10.0 if where == "here" else 0.0] * 2
    assert names(root) == (["10", "20.left", "30.left"] if where == "here" else ["10", "20", "30"])


def test_a_damaged_one_that_is_named_is_an_error_on_all(root, owner):
    damage(file(root, 20, "head-*"))
    config = config_of(root.parent, resume=root / "step-00000020")

    def act(world) -> str:
        backbone, head = parts_of(world)
        with pytest.raises(ValueError) as raised:
            resume(run_of(world, config), backbone, head)
        return str(raised.value)

    for said in in_world(2, act):
        assert "is damaged: its SHA-256" in said
        assert "(--resume DIR" in said
    assert names(root) == ["10", "20", "30"]


def test_damaged_ones_are_not_among_those_that_are_kept(root):
    file(root, 30, "COMPLETE").write_text("")
    file(root, 20, "manifest.json").unlink()
    write(root, 40)
    prune(root, 2, keep_best=False)
    assert names(root) == ["10", "20", "30", "40"]
    write(root, 50)
    prune(root, 2, keep_best=False)
    assert names(root) == ["40", "50"]


def test_what_is_quarantined_is_no_checkpoint_for_the_tools(root, capsys):
    quarantine(root / "step-00000030", DAMAGED)
    assert checkpoint.newest(root) == root / "step-00000020"
    assert verify(VerifyOptions((root,))) == 0
    assert f"{root}/step-00000030.damaged: quarantined" in capsys.readouterr().out
    inspect(InspectOptions(root))
    assert "step-00000030.damaged" in (line := capsys.readouterr().out.splitlines()[-1])
    assert "quarantined by a run" in line
    assert verify(VerifyOptions((root / "step-00000030.damaged",))) == 0
    assert torch.equal(checkpoint.Checkpoint(root / "step-00000020").backbone()["bias"], torch.full((4,), 20.0))
