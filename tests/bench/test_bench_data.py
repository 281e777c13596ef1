"""`python -m benchmarks.data`: what it compares, and what it wants."""

import json
from pathlib import Path

import pytest

from benchmarks.data import DataOptions, bench_data
from tests.unit.verbs.test_pack import make_images


def test_every_stage_of_a_folder_beside_opencv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "photos", [3, 3])
    bench_data(DataOptions(tmp_path / "photos", image_size=8, images=4, batch_size=2, threads=2, rounds=1, json=True))
    printed = json.loads(capsys.readouterr().out)
    sides = {row["side"]: row for row in printed["sides"]}
    assert {"cv2.imdecode", "read", "decode", "transform", "Loader, 1 thread", "Loader, 2 threads"} <= sides.keys()
    assert sides["cv2.imdecode"]["ratio"] == 1
    assert all(row["images_per_s"] > 0 for row in sides.values())
    assert printed["left_out"] == ["ImageRecordIter of MXNet is left out: it reads .rec files only"]


@pytest.mark.parametrize("paths", [{}, {"rec": Path("a"), "train_data": Path("b")}])
def test_one_set_is_given(paths: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="give one set: a path, --rec PATH, --train_data PATH or --train-list PATH"):
        bench_data(DataOptions(**paths))
