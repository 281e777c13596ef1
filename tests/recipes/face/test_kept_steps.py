"""Runs whose threads are refused, and whose data changes before they are resumed (tests/world has the rest)."""

import json
import shutil

import pytest

from partial_fc.checkpoint.read import Checkpoint
from tests.world.made import image
from tests.world.test_accessories import photos as photos_of_world
from tests.world.test_accessories import refuse_threads, train

photos = photos_of_world


def test_a_run_without_threads_and_one_whose_data_changes(photos, tmp_path, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    flags = f"--val-targets {data / 'whole.bin'} --check-data off --max-steps"
    train(tmp_path / "run", data, f"{flags} 4")
    newest = tmp_path / "run/checkpoints/step-00000004"
    found = Checkpoint(newest).manifest
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert found["best"] == result["best"] == {"whole": pytest.approx(found["best_score"])}
    assert found["score"] == result["evaluations"]["whole/accuracy"]
    assert found["data"]["samples"] == 11
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        train(tmp_path / "alone", data, f"{flags} 4")
    assert (tmp_path / "alone/loss.csv").read_text() == (tmp_path / "run/loss.csv").read_text()
    assert Checkpoint(tmp_path / "alone/checkpoints/step-00000004").manifest["score"] == found["score"]
    # 16 of 11 samples: in the midst of the second epoch.
    (data / "train/id000/00.jpg").write_bytes(image(0, 9))
    log = train(tmp_path / "run", data, f"{flags} 6")
    assert sum("data has changed" in line and "11 samples then, 12 now" in line for line in log.splitlines()) == 1
    manifest = Checkpoint(tmp_path / "run/checkpoints/step-00000006").manifest
    assert (manifest["position"], manifest["left_out"]) == (24 + 8, [[16, 24]])
    assert "has changed" not in train(tmp_path / "alone", photos, f"{flags.replace(str(data), str(photos))} 6")
