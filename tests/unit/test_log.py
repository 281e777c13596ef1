"""loss.csv and TensorBoard's files: what a disk does not take ends no training."""

import pytest

from partial_fc.comm import SingleWorld
from partial_fc.train.log import StepLine
from partial_fc.train.record.history import read_history, read_losses, thinned
from partial_fc.train.record.loss_csv import LossCurve
from partial_fc.train.record.loss_picture import draw
from partial_fc.train.record.progress import Progress
from tests.unit.full_disk import full_disk

HEADER = "step,loss,lr\n"


def row(step: int) -> str:
    return f"{step},{1 / step:.9g},0.1\n"


def add(curve: LossCurve, first: int, last: int) -> None:
    for step in range(first, last + 1):
        curve.add(step, 1 / step, 0.1)


def whole(last: int) -> str:
    return HEADER + "".join(map(row, range(1, last + 1)))


def test_rows_wait_while_the_disk_is_full(tmp_path, caplog):
    path = tmp_path / "loss.csv"
    curve = LossCurve(tmp_path, SingleWorld(), 0)
    add(curve, 1, 3)
    assert path.read_text() == whole(3)
    with full_disk(len(whole(5)) + 4):  # in the middle of a row
        add(curve, 4, 300)
    assert path.read_text() == whole(6)[: len(whole(5)) + 4]
    assert caplog.text.count("loss.csv cannot be written") == 1
    add(curve, 301, 301)
    assert path.read_text() == whole(301)
    curve.close()


@pytest.mark.parametrize("back_to", [0, 2, 5, 6, 9, 12])
def test_going_back_needs_no_room(tmp_path, back_to):
    """... to steps whose rows are there, or still wait."""
    curve = LossCurve(tmp_path, SingleWorld(), 0)
    with full_disk(len(whole(5)) + 4):
        add(curve, 1, 9)
        curve.rewind(back_to)
    curve.add(back_to + 1, 1 / (back_to + 1), 0.1)
    curve.close()
    want = whole(min(back_to, 9)) + row(back_to + 1)
    assert (tmp_path / "loss.csv").read_text() == want


def test_what_a_full_disk_never_took_is_told_at_the_end(tmp_path, caplog):
    curve = LossCurve(tmp_path, SingleWorld(), 0)
    with full_disk(len(whole(5)) + 4):
        add(curve, 1, 9)
        curve.close()
    assert "loss.csv lacks the last 4 rows" in caplog.text


@pytest.mark.parametrize("tail", ["", "7,0.2", "\0\0\0", "7,0.2,0.1\n8,0.1,0.1\n", "x,y\n7,0.2,0.1\n"])
def test_a_resumed_run_goes_on_where_its_checkpoint_stands(tmp_path, tail):
    path = tmp_path / "loss.csv"
    path.write_text(whole(6) + tail)
    for first, kept in ((6, 6), (4, 4), (0, 0)):
        curve = LossCurve(tmp_path, SingleWorld(), first)
        assert path.read_text() == whole(kept)
        add(curve, kept + 1, kept + 2)
        curve.close()
        assert path.read_text() == whole(kept + 2)


def test_a_file_that_is_no_curve_is_begun_anew(tmp_path):
    (tmp_path / "loss.csv").write_text("step,lo")
    LossCurve(tmp_path, SingleWorld(), 5).close()
    assert (tmp_path / "loss.csv").read_text() == HEADER


def test_tensorboard_goes_on_once_it_can(tmp_path, caplog):
    folder = tmp_path / "tensorboard"
    folder.write_text("in the way")
    progress = Progress(tmp_path, SingleWorld(), StepLine(1, 10, 4), 0, 0)
    for step in range(3):
        progress.scalars(step, {"train/loss": 1.0})
    assert caplog.text.count("TensorBoard's file below") == 1
    folder.unlink()
    progress._board._next_try = 0.0
    progress.scalars(3, {"train/loss": 1.0})
    progress.close()
    (file,) = folder.iterdir()
    assert b"train/loss" in file.read_bytes()
