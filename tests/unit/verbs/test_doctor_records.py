"""`partial-fc doctor data` on a .rec: each thing that can be wrong is found, where it is, and nothing else is."""

import cv2
import numpy as np

from partial_fc.data.recordio import pack
from tests.unit.doctor_sets import examine, picture, records, write

MAGIC = (0xCED7230A).to_bytes(4, "little")


def test_a_good_set_has_nothing_but_information(tmp_path, capsys):
    assert examine(write(tmp_path / "set", records())) == (0, {})
    printed = capsys.readouterr().out
    assert "RecordIO, 14 images, 4 classes" in printed
    assert "24 x 24: 14" in printed


def cut(content: bytes) -> bytes:
    return content[:-60]


def constant(height: int, width: int, grey: int) -> bytes:
    return cv2.imencode(".png", np.full((height, width, 3), grey, np.uint8))[1].tobytes()


# key -> (its record in a set whose keys 1 to 10 are class 0, 11 to 20 class 1; the finding about it, how bad that is)
FAULTS = {
    2: (pack([0, 1.0], cut(picture(2)), id=2), "image-cut", "error"),
    3: (pack([0, 1.0], cut(picture(3)) + b"\xff\xd9", id=3), "image-damaged", "error"),
    4: (pack([0, 1.0], picture(4)[:-2] + b"\1" * 16 + b"\xff\xd9", id=4), "image-padded", "warning"),
    5: (pack([0, 1.0], picture(5)[:-2] + b"\1" * 60 + b"\xff\xd9", id=5), "image-damaged", "error"),
    6: (pack([0, 1.0], constant(4, 400, 9), id=6), "image-narrow", "error"),
    7: (pack([0, 1.0], b"<html>", id=7), "image-undecodable", "error"),
    8: (pack([0, 1.0], constant(24, 24, 7), id=8), "image-constant", "warning"),
    9: (pack([0, 1.0], picture(9, 30), id=9), "image-other-size", "warning"),
    12: (pack([1, 1.0], picture(11), id=12), "repeated-same-class", "warning"),
    13: (pack([1, 1.0], picture(1), id=13), "repeated-other-class", "error"),
    15: (b"abc", "image-unreadable", "error"),
    16: (pack([1, 1.0], b"", id=16), "image-unreadable", "error"),
}


def keys(finding: dict) -> list[int]:
    """Of the records that it names."""
    return [int(place["file"].rpartition(", key ")[2]) for place in finding["places"]]


def test_each_fault_of_a_record_is_found_where_it_is(tmp_path):
    faulty = {key: record for key, (record, _, _) in FAULTS.items()}
    status, found = examine(write(tmp_path / "set", {**records((10, 10)), **faulty}, "2,24,24\n"))
    expected: dict[str, list[int]] = {}
    for key, (_, finding, severity) in FAULTS.items():
        expected.setdefault(finding, []).append(key)
        assert found[finding]["severity"] == severity
    assert {finding: keys(f) for finding, f in found.items()} == expected
    assert status == 1


def test_labels_out_of_range_and_from_1(tmp_path):
    _, found = examine(write(tmp_path / "set", records()), num_classes=3)
    assert set(found) == {"label-range"}
    assert keys(found["label-range"]) == [13, 14]
    plain = {key: pack(key, picture(key), id=key) for key in (1, 2, 3)}
    _, found = examine(write(tmp_path / "one", {**plain, 4: pack(3, picture(4), id=4)}, "3,24,24\n"))
    assert "they count from 1" in found["label-range"]["what"]


def test_classes_without_one_and_nearly_all_images(tmp_path):
    counts = {0: 1, 2: 2, 3: 250, 4: 2}
    labels = [label for label, count in counts.items() for _ in range(count)]
    plain = {key: pack(label, picture(key, 8), id=key) for key, label in enumerate(labels)}
    status, found = examine(write(tmp_path / "set", plain, "7,8,8\n"), images=False)
    assert status == 0
    classes = {key: [place["class"] for place in f["places"]] for key, f in found.items()}
    assert classes == {"class-unused": [1, 5, 6], "class-one-image": [0], "class-huge": [3]}


def test_a_label_without_measure_is_an_error_and_allocates_nothing(tmp_path):
    for label in (2.0**60, 1e30):
        folder = write(tmp_path / "set", {**records(), 2: pack([label, 1.0], picture(2), id=2)})
        status, found = examine(folder, images=False)
        assert (status, set(found), keys(found["image-unreadable"])) == (1, {"image-unreadable"}, [2])
        assert "expected a whole number" in found["image-unreadable"]["places"][0]["problem"]
    folder = write(tmp_path / "set", {key: pack(0.5, picture(key), id=key) for key in (1, 2)})
    status, found = examine(folder, images=False, num_classes=10**14)
    assert (status, set(found)) == (1, {"image-unreadable", "label-none"})
    (tmp_path / "list").write_text(f"a.jpg 0\nb.jpg {10**15}\n")
    status, found = examine(tmp_path / "list", images=False)
    assert (status, set(found)) == (1, {"class-number"})
    assert found["class-number"]["places"][0]["file"].endswith("b.jpg")


def test_one_label_for_all_is_an_error(tmp_path):
    lost = {key: pack(0, picture(key), id=key) for key in range(1, 5)}
    status, found = examine(write(tmp_path / "set", lost))
    assert status == 1
    assert found["label-constant"]["places"] == [{"class": 0, "images": 4}]


def test_the_index_against_the_file(tmp_path):
    """An offset points to no frame, one into a record's middle; one behind the file; the last record is cut off."""
    folder = write(tmp_path / "set", {**records(), 2: pack([0, 1.0], b"x" * 4 + MAGIC + b"y" * 8, id=2)})
    lines = dict(line.split("\t") for line in (folder / "train.idx").read_text().splitlines())

    def examined(**changed: int) -> dict[str, dict]:
        now = lines | {key[1:]: str(offset) for key, offset in changed.items()}
        (folder / "train.idx").write_text("".join(f"{key}\t{offset}\n" for key, offset in now.items()))
        status, found = examine(folder)
        assert status == 1
        return found

    into_2 = int(lines["2"]) + 8 + 24 + 8 + 4  # the second part of the split record
    assert keys(examined(_2=into_2, _5=int(lines["5"]) + 4)["image-unreadable"]) == [2, 5]
    assert "123456788" in examined(_6=123456788)["set-unreadable"]["what"]
    with open(folder / "train.rec", "r+b") as file:
        file.truncate((folder / "train.rec").stat().st_size - 12)
    assert "key 18" in examined()["set-unreadable"]["what"]


def test_more_places_than_are_shown(tmp_path, capsys):
    _, found = examine(write(tmp_path / "b", {k: pack(9, picture(k), id=k) for k in range(1, 9)}), show=2)
    assert len(found["label-range"]["places"]) == 8  # all of them, for a program
    assert "train.rec, key 2, class 9\n    ... and 6 more\n" in capsys.readouterr().out
