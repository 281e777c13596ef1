"""The report of a run: one file, nothing from outside, nothing from data that a browser would run."""

import json
import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.data import Batch
from partial_fc.models.inputs import FACE
from partial_fc.train.record import first_batch
from partial_fc.train.record.curve import Curve
from partial_fc.train.record.log import StepLine
from partial_fc.train.record.progress import Progress
from partial_fc.verbs.report.page import ReportOptions, page, report
from partial_fc.verbs.report.run_facts import read_run
from tests.recipes.face.test_log_style import opened

EVIL = "<script>alert('1\" & x $a^$')</script>"


class Read(HTMLParser):
    """Keeps what the page would load or run, and its words."""

    def __init__(self, text: str):
        super().__init__()
        self.loaded: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def run(tmp_path):
    """A run under way, started twice, whose names are as bad as they can be."""
    root = tmp_path / "<b>run"
    with opened(root, SingleWorld()) as logger:
        logger.info(f"note: {EVIL} is a note")
        logger.warning(f"bad record 1 of at most 100, replaced: {EVIL}: cut")
    for start in (0, 20):
        curve = Curve(root, SingleWorld(), start)
        progress = Progress(root, SingleWorld(), StepLine(20, 100, 50), start, 0)
        for step in range(start + 1, start + 21):
            curve.add(step, 30 / step, 0.1)
        progress.report(start + 20, 20, 0.4, 1.0, 0.1, {"data": 0.25, "backbone": 0.75})
        progress.scalars(start + 20, {f"score/{EVIL}": 0.9})
        progress.close()
        curve.close()
    values = {"rec": EVIL, "network": "tiny", "lr": 0.1, "margins": [1, 0.5, 0]}
    start = {"recipe": "face", "command": ["train.py", "face", "--rec", EVIL], "world_size": 1}
    start |= {"configuration": values, "differs": {"rec": EVIL}, "versions": {"torch": "2"}}
    (root / "configuration.json").write_text(json.dumps(start))
    job: Any = SimpleNamespace(
        models_root=root, world=SingleWorld(), class_names=["a", EVIL], backbone=SimpleNamespace(to_input=FACE)
    )
    image = torch.arange(3 * 10 * 20, dtype=torch.uint8).reshape(1, 3, 10, 20).repeat(9, 1, 1, 1)
    label = torch.tensor([1] + [0] * 8)
    first_batch.write(job, Batch(image, label, torch.arange(9), 0.0, 9, 9))
    cv2.imwrite(str(root / "roc.png"), np.zeros((4, 4, 3), np.uint8))
    return root


def test_one_file_and_nothing_that_runs(run, tmp_path, capsys):
    out = tmp_path / "r.html"
    report(ReportOptions(run, out))
    assert str(out) in capsys.readouterr().out
    text = out.read_text()
    seen = Read(text)
    assert not seen.tags & {"script", "link", "iframe", "object", "b1"}
    assert all(place.startswith(("data:image/png;base64,", "#")) for place in seen.loaded)
    assert not re.search(r"https?:|url\(|@import", text)
    told = ("step 40", "not finished", EVIL, "90.00 %", "bad record 1 of at most 100", "ROC", "--margins", "1 0.5 0")
    for words in told:
        assert words in seen.words
    assert len([place for place in seen.loaded if place.startswith("data:")]) == 6


def test_a_score_that_was_measured_once_is_a_row_without_a_chart(run):
    facts = read_run(run)
    assert 'alt="score over steps"' in page(facts)  # it was evaluated twice
    del facts.scalars[f"score/{EVIL}"][0]
    assert 'alt="score over steps"' not in page(facts)


def test_what_is_evaluated_anew_has_one_picture(run):
    (run / "evaluation").mkdir()
    shutil.copy(run / "roc.png", run / "evaluation/roc.png")
    ((title, _),) = read_run(run).pictures
    assert title == "ROC: true accept rate over false accept rate (evaluation)"


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "loss.csv").write_text("step,loss,lr\n")
    assert "No step yet" in Read(page(read_run(tmp_path))).words
    (tmp_path / "loss.csv").write_text("step,loss,lr\n1,nan,0.1\n")
    assert Read(page(read_run(tmp_path))).words


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"is no folder of a run; expected configuration\.json"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json: .*JSON"):
        read_run(tmp_path)
