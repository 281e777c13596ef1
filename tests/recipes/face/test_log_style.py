"""The log of recipe face: what parsers of InsightFace's logs find in it, to the letter."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from partial_fc.comm import SingleWorld
from partial_fc.train.record.log import Interval, open_files
from partial_fc.train.record.progress import Progress
from recipes.face.log_style import SpeedLine, SummedUp
from recipes.face.main import HIST
from tests.unit.stored_checkpoints import OneOf

VALUES = {"lfw/xnorm": 21.3721154, "lfw/accuracy": 0.995166, "lfw/accuracy_std": 0.003687, "lfw/tar@far=1e-3": 0.9871}
# As people read arcface_torch's training.log: the groups are what they plot.
SPEED = re.compile(
    r"^Training: [\d-]+ [\d:,]+-Speed ([\d.]+) samples/sec   Loss ([\d.]+)   LearningRate ([\d.eE-]+)   "
    r"Epoch: (\d+)   Global Step: (\d+)   (?:Fp16 Grad Scale: +(\d+)   )?Required: (\d+) hours"
)
EVALUATION = re.compile(
    r"^Training: [\d-]+ [\d:,]+-\[([\w-]+)\]\[(\d+)\](XNorm|Accuracy-Flip|Accuracy-Highest): ([\d.]+)(?:\+-([\d.]+))?$"
)


class Set:
    name = "lfw"


@contextmanager
def opened(*given, **more) -> Iterator[logging.Logger]:
    """A rank's log, closed at the end."""
    logger = open_files(*given, **more)
    try:
        yield logger
    finally:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True


@pytest.mark.parametrize("scale", [None, 65536.0])
def test_parsers_of_arcface_torch_read_training_log(tmp_path, capsys, scale):
    """... and the terminal has each fact once, in lines that fit."""
    since = Interval(12.34561, 2411.314, "12 left", 5760.0, scale)
    with opened(tmp_path, OneOf(0, 1), hist=HIST) as logger:
        logger.info(SpeedLine(100, 51300, 1000).text(100, 2560, 1.0, 0.1, since))
        for line in SummedUp([Set()]).lines(2000, 1.5, VALUES, {"lfw": 0.99533}):
            logger.info(line)
    speed, *evaluation, summary = (tmp_path / "training.log").read_text().splitlines()
    found = SPEED.match(speed)
    assert found
    hours = ("65536" if scale else None, "2")
    assert found.groups() == ("2411.31", "12.3456", "0.100000", "2", "100", *hours)
    assert [match.groups() for match in map(EVALUATION.match, evaluation) if match] == [
        ("lfw", "2000", "XNorm", "21.372115", None),
        ("lfw", "2000", "Accuracy-Flip", "0.99517", "0.00369"),
        ("lfw", "2000", "Accuracy-Highest", "0.99533", None),
    ]
    assert summary.endswith("verification, step 2000: lfw 99.52 % (best 99.53 %, TAR at FAR 1e-3 98.71 %)")
    assert capsys.readouterr().out.splitlines() == [
        "step 100/51300 · loss 12.3 · 2411 img/s · 1:36:00 left",
        "step 2000 · lfw 99.52 % · best 99.53 %",
    ]


def test_the_terminal_says_how_bad_and_of_whom_a_warning_is(tmp_path, capsys):
    for rank in (0, 1):
        with opened(tmp_path, OneOf(rank, 2)) as logger:
            logger.info("a note")
            logger.warning("disk full")
    assert capsys.readouterr().out == "a note\nwarning: disk full\nrank 1: warning: disk full\n"
    assert " rank 1 W disk full" in (tmp_path / "logs/rank-0001.log").read_text()


def test_the_first_lines_come_at_once(tmp_path):
    """... also of a run that is resumed."""
    progress = Progress(tmp_path, SingleWorld(), SpeedLine(50, 400, 8), 130, 0)
    assert [step for step in range(131, 401) if progress.due(step, 0)] == [*(131, 132, 135, 140), *range(150, 401, 50)]
    progress.close()


def test_the_mean_loss_is_that_since_the_line_before(tmp_path, caplog):
    progress = Progress(tmp_path, SingleWorld(), SpeedLine(2, 4, 8), 0, 0)
    with caplog.at_level(logging.INFO, "partial_fc"):
        for step, loss in enumerate((9.0, 5.0, 4.0, 1.0), start=1):
            progress.advance(loss)
            if step % 2 == 0:
                progress.report(step, 4 * step, step / 2, loss, 0.1, {})
    progress.close()
    assert re.findall(r"Loss ([\d.]+)", caplog.text) == ["7.0000", "2.5000"]


@pytest.mark.parametrize(("typed_there", "local_rank", "shown"), [(True, 0, "a\n"), (True, 1, ""), (False, 0, "")])
def test_a_host_whose_command_was_typed_there_shows_its_lines(
    tmp_path, monkeypatch, capsys, typed_there, local_rank, shown
):
    """--nodes and --num-shards: nobody brings its lines to another terminal, as horovodrun does."""
    if typed_there:
        monkeypatch.setenv("PARTIAL_FC_PARENT", "1")
    world = OneOf(2, 4)
    world.local_rank = local_rank
    with opened(tmp_path, world) as logger:
        logger.info("a")
    assert capsys.readouterr().out[-2:] == shown
