"""Loss spikes: told where they are, once, and nowhere else."""

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from partial_fc.data import Batch
from partial_fc.train.guards import loss_spikes
from partial_fc.train.guards.loss_spikes import LEAST, WRITTEN, Spike, SpikeDetector

CURVE = Path(__file__).parents[1] / "losses_of_the_demo.txt"


def spikes_of(losses) -> list[int]:
    """Indices of the losses that are told."""
    watched = SpikeDetector()
    return [index for index, loss in enumerate(losses) if watched.add(float(loss))]


def noise(seed: int, size: int = 3000) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).standard_normal(size)


step = np.arange(3000.0)
QUIET = {
    "normal noise": 5 + 0.3 * noise(1),
    "long tails": 5 + 0.3 * np.exp(0.4 * noise(2)),
    "a warm-up that first makes it worse": 20 + 8 * np.minimum(step / 200, 1) + 0.5 * noise(3),
    "a fall by exp(-step)": 30 * np.exp(-step / 300) * (1 + 0.1 * noise(4)) + 0.1,
    "a rate that falls to a tenth": np.where(step < 1000, 4.0, 2.0) + 0.2 * noise(5),
    "constant": np.full(3000, 0.25),
    "nearly nothing": 1e-3 * np.exp(0.3 * noise(6)),
    "slow divergence": 5 + step / 300 + 0.1 * noise(7),
}


@pytest.mark.parametrize("name", QUIET)
def test_no_alarm_without_a_spike(name):
    assert spikes_of(QUIET[name]) == []


def test_no_alarm_on_the_demos_losses():
    """Recorded: 1,641 steps of `make demo` in fp32, with network tiny and AdamW."""
    losses = [float(line) for line in CURVE.read_text().split()]
    assert len(losses) == 1641
    assert spikes_of(losses) == []
    for at in (60, 400, 1000, 1600):
        spoilt = [*losses[:at], 2 * losses[at] + 30, *losses[at + 1 :]]
        assert spikes_of(spoilt) == [at]


def test_no_alarm_where_the_data_is_learned(monkeypatch):
    """Recorded: 1,080 steps of 25 images of 50 glyph classes (--network tiny); the median falls from 20 to 0.02."""
    losses = [float(line) for line in (CURVE.parent / "losses_of_a_learned_set.txt").read_text().split()]
    assert spikes_of(losses) == []
    assert spikes_of([*losses[:1000], 3.0, *losses[1000:]]) == [1000]
    monkeypatch.setattr(loss_spikes, "FLOOR", 0.0)
    assert len(spikes_of(losses)) == 8


def test_a_spike_is_told_once_and_with_its_numbers():
    losses = 5 + 0.3 * noise(1, 1000)
    losses[400:405] = 30
    losses[700] = 12
    assert spikes_of(losses) == [400, 700]
    watched = SpikeDetector()
    for loss in losses[:400]:
        assert watched.add(loss) is None
    found = watched.add(30.0)
    assert found is not None
    assert found.loss == 30
    assert found.usual == np.median(losses[200:400])
    assert found.spread == pytest.approx(0.3, rel=0.2)


def test_nothing_is_far_before_enough_is_known_and_what_is_not_finite_does_not_count():
    assert spikes_of([1.0] * (LEAST - 1) + [100.0]) == []
    assert spikes_of([1.0] * LEAST + [100.0]) == [LEAST]
    assert spikes_of([math.nan, math.inf] * 100 + [1.0] * LEAST + [math.nan, 100.0]) == [201 + LEAST]


def job_of(root: Path, rank: int, step: int, position: int) -> Any:
    at, world = SimpleNamespace(step=step, position=position), SimpleNamespace(rank=rank)
    return SimpleNamespace(models_root=root, world=world, at=at, logger=logging.getLogger("test"))


def test_the_records_of_a_spike_are_written_down(tmp_path, caplog):
    job = job_of(tmp_path, 3, 77, 640)
    image = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    batches = [Batch(image, torch.tensor([5, 6]), torch.tensor([i, 40]), 0.0, 640, 2) for i in (1, 2)]
    watched = SpikeDetector()
    for _ in range(LEAST):
        watched.add(1.0)
    found = watched.add(9.0)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            watched.note(job, found, batches, lr=0.1)
    assert "step 77: the loss is 9.0000, far above the median 1.0000" in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "spikes/rank-00003.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert rows[0]["keys"] == [1, 40, 2, 40]
    assert rows[0]["labels"] == [5, 6, 5, 6]
    assert (rows[0]["step"], rows[0]["loss"], rows[0]["median"]) == (77, 9.0, 1.0)

    (tmp_path / "in-the-way").write_text("")
    job.models_root = tmp_path / "in-the-way"
    watched.note(job, found, batches, lr=0.1)
    assert "rank-00003.jsonl: left out" in caplog.text


def test_many_spikes_are_counted_not_listed(tmp_path, caplog):
    job = job_of(tmp_path, 0, 0, 0)
    watched = SpikeDetector()
    with caplog.at_level(logging.INFO):
        for job.at.step in range(1, 141):
            watched.note(job, Spike(5.0 + (job.at.step == 60), 1.0, 0.1), [], 0.1)
        watched.sum_up(job)
    assert [message.split(":")[0] for message in caplog.messages] == [f"step {n}" for n in (1, 2, 3, 10, 100, 140)]
    assert caplog.messages[2].endswith("further spikes are only counted")
    assert "step 140: 140 loss spikes so far, the largest of 6.0000 in step 60" in caplog.messages[-1]
    assert len((tmp_path / "spikes/rank-00000.jsonl").read_text().splitlines()) == WRITTEN
