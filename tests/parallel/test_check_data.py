"""What --check-data makes of good and bad data: the same on all ranks, whoever sees it."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from partial_fc.data import ImageFolder, RecordSource, open_on_all
from partial_fc.data.check.at_start import check_data
from partial_fc.data.recordio import RecordWriter, pack

NUM_CLASSES = 7
N = 61  # no multiple of any number of ranks


def picture(seed: int) -> bytes:
    image = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    return cv2.imencode(".png", image)[1].tobytes()


def source(folder: Path, contents: dict[int, bytes] | None = None, labels: dict[int, float] | None = None):
    """N records; contents and labels are those that differ from a good set's."""
    with RecordWriter(folder / "train.rec") as writer:
        for key in range(N):
            label = (labels or {}).get(key, key % NUM_CLASSES)
            writer.write(key, pack(label, (contents or {}).get(key, picture(key)), id=key))
    return RecordSource(folder, NUM_CLASSES)


def check(source, world, mode="quick", max_bad_records=100) -> list[str]:
    return check_data(source, NUM_CLASSES, mode, world, max_bad_records=max_bad_records)


def test_good_data(world, tmp_path):
    (line,) = check(source(tmp_path), world)
    assert f"quick: {N} of {N} images" in line
    assert line.endswith("nothing wrong")


def test_off_looks_at_nothing(world, tmp_path):
    assert check(source(tmp_path, {key: b"rubbish" for key in range(N)}), world, "off") == []


@pytest.mark.parametrize("labels", [{5: 7}, {0: -1}, dict.fromkeys(range(N), 3), {60: 1e6}])
def test_labels_of_another_number_of_classes_or_of_one(world, tmp_path, labels):
    with pytest.raises(ValueError, match="--check-data") as error:
        check(source(tmp_path, labels=labels), world)
    key, label = next(iter(labels.items()))
    assert f"key {key}, class {label:.0f}" in str(error.value) or f"class {label}, images {N}" in str(error.value)


def test_labels_where_they_are_not_cheap(world, tmp_path, monkeypatch):
    monkeypatch.setattr("partial_fc.data.check.at_start._CHEAP_BYTES", 0)
    (line,) = check(source(tmp_path), world)
    assert "their labels" in line
    with pytest.raises(ValueError, match=r"label-range \(1\): .*\n.*key 5, class 7"):
        check(source(tmp_path, labels={5: 7}), world)
    with pytest.raises(ValueError, match="all labels are 3"):
        check(source(tmp_path, labels=dict.fromkeys(range(N), 3)), world)


def test_damaged_records_up_to_what_the_loader_replaces(world, tmp_path):
    narrow = cv2.imencode(".png", np.zeros((4, 400), np.uint8))[1].tobytes()
    bad = {3: b"rubbish", 20: narrow, 40: b"rubbish"}
    said = check(source(tmp_path, bad), world, max_bad_records=3)
    assert ": 2 findings" in said[0]
    assert sorted(line.split(", ")[1] for line in said[2:4]) == ["key 3", "key 40"]
    assert "no image that OpenCV can read" in said[2]
    assert "image-narrow (1)" in said[4]
    assert "key 20, class 6, problem image of 400 x 4 pixels" in said[5]
    with pytest.raises(ValueError, match=r"3 of 61 images .* 2 on a rank"):
        check(source(tmp_path, bad), world, max_bad_records=2)


def test_a_label_that_cannot_be_read_is_a_damaged_record(world, tmp_path):
    said = check(source(tmp_path, labels={4: 0.5}), world)
    assert f"61 of 61 images and {N - 1} labels" in said[0]
    assert "image-unreadable (1)" in said[1]
    assert "key 4: label 0.5" in said[2]
    with pytest.raises(ValueError, match=r"label-range \(1\): .*\n.*key 5, class 7"):  # the others are judged
        check(source(tmp_path, labels={4: 0.5, 5: 7}), world)


def test_images_that_show_nothing(world, tmp_path):
    grey = [cv2.imencode(".png", np.full((8, 8, 3), key, np.uint8))[1].tobytes() for key in range(N)]
    with pytest.raises(ValueError, match=f"{N - 20} of {N} images are of a single colour"):
        check(source(tmp_path, {key: grey[key] for key in range(20, N)}), world)
    with pytest.raises(ValueError, match="identical"):
        check(source(tmp_path, dict.fromkeys(range(N), picture(0))), world)


def test_a_sample_of_a_large_set(world, tmp_path, monkeypatch):
    """Of 61 images 13: two bad ones stand for nine; where they lie does not depend on the number of ranks."""
    monkeypatch.setattr("partial_fc.data.check.at_start._SAMPLE", 13)
    (line,) = check(source(tmp_path), world)
    assert f"13 of {N} images and all labels" in line
    bad = source(tmp_path, {key: b"rubbish" for key in range(0, 15)})
    with pytest.raises(ValueError, match="3 of 13 images cannot be used, an estimated 14 of 61"):
        check(bad, world, max_bad_records=5)
    assert check(bad, world, max_bad_records=20)[0].endswith(": 1 finding")


@pytest.mark.parametrize("bad", [{}, {4: 0.5}])
def test_labels_that_differ_between_ranks(world, tmp_path, bad):
    if world.size == 1:
        pytest.skip("needs two ranks")
    last = world.rank == world.size - 1
    with pytest.raises(ValueError, match=r"other labels.*not the same on all hosts"):
        check(source(tmp_path, labels={**bad, 5: 6} if last else bad), world)


def test_data_that_differs_between_ranks(world, tmp_path):
    if world.size == 1:
        pytest.skip("needs two ranks")
    last = world.rank == world.size - 1
    if not last:
        source(tmp_path)

    def opened():
        return ImageFolder(tmp_path) if last else RecordSource(tmp_path, NUM_CLASSES)

    with pytest.raises(ValueError, match=rf"rank {world.size - 1}: .*no image in them"):
        open_on_all(opened, world)
    source(tmp_path)
    with pytest.raises(ValueError, match=f"rank {world.size - 1} 61 images, 8 classes"):
        open_on_all(lambda: RecordSource(tmp_path, NUM_CLASSES + last), world)


def test_data_that_opens_everywhere(world, tmp_path):
    (tmp_path / "classes.txt").write_bytes(b"Bj\xf6rn\n")  # no UTF-8
    made = source(tmp_path)
    assert open_on_all(lambda: made, world) is made
