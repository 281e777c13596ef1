"""What rank 0 writes down: loss.csv, TensorBoard, wandb. What a disk does not take ends no training."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from partial_fc import accessories
from partial_fc.comm import SingleWorld
from partial_fc.flags import RunFlags
from partial_fc.train.record.boards import open_wandb
from partial_fc.train.record.curve import Curve, read_scalars
from partial_fc.train.record.log import StepLine
from partial_fc.train.record.progress import Progress
from tests.unit.full_disk import full_disk

HEADER = "step,loss,lr\n"


def row(step: int) -> str:
    return f"{step},{1 / step:.9g},0.1\n"


def add(curve: Curve, first: int, last: int) -> None:
    for step in range(first, last + 1):
        curve.add(step, 1 / step, 0.1)


def whole(last: int) -> str:
    return HEADER + "".join(map(row, range(1, last + 1)))


def test_rows_wait_while_the_disk_is_full(tmp_path, caplog):
    path = tmp_path / "loss.csv"
    curve = Curve(tmp_path, SingleWorld(), 0)
    add(curve, 1, 3)
    assert path.read_text() == whole(3)
    with full_disk(len(whole(5)) + 4):  # in the middle of a row
        add(curve, 4, 300)
    assert path.read_text() == whole(6)[: len(whole(5)) + 4]
    assert caplog.text.count("loss.csv cannot be written") == 1
    add(curve, 301, 301)
    assert path.read_text() == whole(301)
    curve.close()


def test_who_wrote_before_writes_to_another_file(tmp_path):
    """A rank 0 that was cut off, and is back."""
    before = Curve(tmp_path, SingleWorld(), 0)
    add(before, 1, 5)
    curve = Curve(tmp_path, SingleWorld(), 4)
    add(before, 6, 6)
    add(curve, 5, 7)
    assert (tmp_path / "loss.csv").read_text() == whole(7)
    before.close()
    curve.close()


@pytest.mark.parametrize("back_to", [0, 2, 5, 6, 9, 12])
def test_going_back_needs_no_room(tmp_path, back_to):
    """... to steps whose rows are there, or still wait."""
    curve = Curve(tmp_path, SingleWorld(), 0)
    with full_disk(len(whole(5)) + 4):
        add(curve, 1, 9)
        curve.rewind(back_to)
    curve.add(back_to + 1, 1 / (back_to + 1), 0.1)
    curve.close()
    want = whole(min(back_to, 9)) + row(back_to + 1)
    assert (tmp_path / "loss.csv").read_text() == want


def test_what_a_full_disk_never_took_is_told_at_the_end(tmp_path, caplog):
    curve = Curve(tmp_path, SingleWorld(), 0)
    with full_disk(len(whole(5)) + 4):
        add(curve, 1, 9)
        curve.close()
    assert "loss.csv lacks the last 4 rows" in caplog.text


@pytest.mark.parametrize("tail", ["", "7,0.2", "\0\0\0", "7,0.2,0.1\n8,0.1,0.1\n", "x,y\n7,0.2,0.1\n"])
def test_a_resumed_run_goes_on_where_its_checkpoint_stands(tmp_path, tail):
    path = tmp_path / "loss.csv"
    path.write_text(whole(6) + tail)
    for first, kept in ((6, 6), (4, 4), (0, 0)):
        curve = Curve(tmp_path, SingleWorld(), first)
        assert path.read_text() == whole(kept)
        add(curve, kept + 1, kept + 2)
        curve.close()
        assert path.read_text() == whole(kept + 2)


def test_tensorboard_goes_on_once_it_can(tmp_path, caplog):
    folder = tmp_path / "tensorboard"
    folder.write_text("in the way")
    progress = Progress(tmp_path, SingleWorld(), StepLine(1, 10, 4), 0, 0)
    for step in range(3):
        progress.scalars(step, {"train/loss": 1.0})
    assert caplog.text.count("TensorBoard's file below") == 1
    folder.unlink()
    accessories.begin_anew()
    progress.scalars(3, {"train/loss": 1.0})
    progress.close()
    (file,) = folder.iterdir()
    assert b"train/loss" in file.read_bytes()


def test_scalars_are_those_that_count(tmp_path):
    """Steps that are done again are there once; NaN is none."""
    line = StepLine(2, 6, 4)
    first = Progress(tmp_path, SingleWorld(), line, 0, 0)
    for step in (2, 4):
        first.report(step, step, 0.5, 1.0 / step, 0.1, {"data": 0.25})
        first.scalars(step, {"score/lfw": step / 8, "score/cfp": math.nan})
    first.rewind(2, 2)
    first.close()
    again = Progress(tmp_path, SingleWorld(), line, 2, 2)
    again.report(4, 4, 1.0, 0.125, 0.1, {"data": 0.5})
    again.close()
    found = read_scalars(tmp_path)
    assert found["train/loss"] == [(2, 0.5), (4, 0.125)]
    assert found["time/data"] == [(2, 0.25), (4, 0.5)]
    assert found["score/lfw"] == [(2, 0.25), (4, 0.5)]
    assert not found["score/cfp"]


def test_wandb_gets_what_tensorboard_gets(tmp_path, monkeypatch):
    """Beside a stand-in: the library itself is not installed for tests (docs/after-training.md has its run)."""
    given, run = [], Mock(id="abc")
    wandb = SimpleNamespace(Error=RuntimeError, init=lambda **flags: given.append(flags) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        board = open_wandb("faces", tmp_path, {"lr": 0.1, "rec": Path("x")}, SingleWorld())
    progress = Progress(tmp_path, SingleWorld(), StepLine(1, 9, 4), 0, 0, board)
    progress.scalars(3, {"train/loss": 1.5})
    progress.close()
    run.log.assert_called_once_with({"train/loss": 1.5, "step": 3})
    assert run.define_metric.call_args_list[:2] == [call("step"), call("*", step_metric="step")]
    run.finish.assert_called_once()
    assert [flags["id"] for flags in given] == [None, "abc"]  # a resumed run is the same one
    assert (given[0]["project"], given[0]["config"]) == ("faces", {"lr": 0.1, "rec": "x"})

    def fail(**_: object) -> None:
        raise wandb.Error("no API key")

    wandb.init = fail
    with pytest.raises(ValueError, match=r"--wandb faces: wandb cannot begin: no API key.*WANDB_MODE=offline"):
        open_wandb("faces", tmp_path, {}, SingleWorld())


def test_wandb_that_is_not_installed():
    with pytest.raises(ValueError, match="--wandb faces needs the package wandb, which is not installed: `pip install"):
        RunFlags(models_root=Path("x"), wandb="faces")
