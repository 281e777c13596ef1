"""The log of InsightFace's MXNet trainer, to the letter."""

import logging
import re

import pytest

from partial_fc.comm import SingleWorld
from partial_fc.train.log import Interval, Progress, open_files
from partial_fc.train.log_style import STYLES
from tests.unit.stored_checkpoints import OneOf

THEIRS = STYLES["insightface-mxnet"]


class Set:
    name = "lfw"


def test_lines_to_the_letter():
    line = THEIRS.line(20, 90, 1000)
    assert [step for step in range(1, 91) if line.due(step, 0)] == [20, 40, 60, 80]
    text = line.text(40, 2560, 1.0, 0.1, Interval(33.456, 1564.816, 391.204, "unused"))
    assert text == "Iter:40 Rank:391.20 it/sec Total:1564.82 it/sec [2][loss]:33.46 "
    values = {"lfw/xnorm": 21.3721154, "lfw/accuracy": 0.995166, "lfw/accuracy_std": 0.003687}
    assert THEIRS.verifications([Set()]).lines(2000, 1.5, values, {"lfw": 0.99533}) == [
        "[lfw][2000]XNorm: 21.372115",
        "[lfw][2000]Accuracy-Flip: 0.99517+-0.00369",
        "[lfw][2000]Accuracy-Highest: 0.99533",
    ]


def test_the_mean_loss_is_that_since_the_line_before(tmp_path, caplog):
    progress = Progress(tmp_path, SingleWorld(), THEIRS.line(2, 4, 8), 0, 0)
    with caplog.at_level(logging.INFO, "partial_fc"):
        for step, loss in enumerate((9.0, 5.0, 4.0, 1.0), start=1):
            progress.advance(loss)
            if step % 2 == 0:
                progress.report(step, 4 * step, step / 2, loss, 0.1, {})
    progress.close()
    ends = [message.rpartition("it/sec ")[2] for message in caplog.messages if message.startswith("Iter:")]
    assert ends == ["[1][loss]:7.00 ", "[2][loss]:2.50 "]


@pytest.mark.parametrize("rank", [0, 3])
def test_every_line_of_every_rank_is_in_its_file(tmp_path, capsys, rank):
    logger = open_files(tmp_path, OneOf(rank, 4), hist=THEIRS.hist)
    try:
        logger.info("Iter:20 ")
    finally:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True
    written = (tmp_path / f"{rank}_hist.log").read_text()
    assert re.fullmatch(rf"rank-id:{rank}:\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}}-Iter:20 \n", written)
    assert capsys.readouterr().out == (written if rank == 0 else "")
