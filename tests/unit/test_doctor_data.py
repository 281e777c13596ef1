"""`partial-fc doctor data`: each thing that can be wrong is found, where it is, and nothing else is."""

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from partial_fc.data.idx import write_idx
from partial_fc.data.pack import PackOptions, pack_images
from partial_fc.data.pairs import write_pairs
from partial_fc.data.recordio import RecordReader, RecordWriter, pack
from partial_fc.doctor.data import DataOptions, doctor_data
from partial_fc.doctor.records import Records

COUNTS = (4, 3, 5, 2)
MAGIC = (0xCED7230A).to_bytes(4, "little")


def picture(seed: int, size: int = 24) -> bytes:
    """A JPEG file unlike those of other seeds."""
    few = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return cv2.imencode(".jpg", cv2.resize(few, (size, size)))[1].tobytes()


def records() -> dict[int, bytes]:
    """Key -> record, in InsightFace's layout."""
    label_N = np.repeat(np.arange(len(COUNTS)), COUNTS).tolist()
    out = {key: pack([label, 1.0], picture(key), id=key) for key, label in enumerate(label_N, start=1)}
    first = 1 + sum(COUNTS)
    out[0] = pack([first, first + len(COUNTS)], b"")
    start = 1
    for label, count in enumerate(COUNTS):
        out[first + label] = pack([start, start + count], b"", id=first + label)
        start += count
    return out


def write(folder: Path, records: dict[int, bytes], said: str = "4,24,24\n") -> Path:
    folder.mkdir(exist_ok=True)
    with RecordWriter(folder / "train.rec") as writer:
        for key, record in records.items():
            writer.write(key, record)
    (folder / "property").write_text(said)
    return folder


def examine(source: Path, **options) -> tuple[int, dict[str, dict]]:
    """(exit status, findings by key) without those that are for information."""
    path = source.parent / f"{source.name}-report.json"
    status = doctor_data(DataOptions(source, report=path, bar=False, **options))
    report = json.loads(path.read_text())
    found = {f["key"]: f for f in report["findings"] if f["severity"] != "info"}
    assert len(found) == report["errors"] + report["warnings"]  # each key once
    assert status == int(report["errors"] > 0)
    return status, found


def test_a_good_set_has_nothing_but_information(tmp_path, capsys):
    assert examine(write(tmp_path / "set", records())) == (0, {})
    printed = capsys.readouterr().out
    assert "RecordIO, 14 images, 4 classes" in printed
    assert "class after class" in printed
    assert "24 x 24: 14" in printed


def changed(**replace: bytes | None) -> dict[int, bytes]:
    out = records()
    for name, record in replace.items():
        key = int(name[1:])
        if record is None:
            del out[key]
        else:
            out[key] = record
    return out


def cut(content: bytes) -> bytes:
    return content[:-60]


# what is wrong -> (records, the only finding, its places' keys, exit status)
WRONG = {
    "cut short": (changed(k2=pack([0, 1.0], cut(picture(2)), id=2)), "image-cut", [2], 1),
    "cut, with an end marker": (
        changed(k2=pack([0, 1.0], cut(picture(2)) + b"\xff\xd9", id=2)),
        "image-damaged",
        [2],
        1,
    ),
    "no image": (changed(k9=pack([2, 1.0], b"<html>", id=9)), "image-undecodable", [9], 1),
    "one colour": (
        changed(k3=pack([0, 1.0], cv2.imencode(".png", np.full((24, 24, 3), 7, np.uint8))[1].tobytes(), id=3)),
        "image-constant",
        [3],
        0,
    ),
    "another size": (changed(k3=pack([0, 1.0], picture(3, 30), id=3)), "image-other-size", [3], 0),
    "again in its class": (changed(k3=pack([0, 1.0], picture(2), id=3)), "repeated-same-class", [3], 0),
    "again in another class": (changed(k6=pack([1, 1.0], picture(2), id=6)), "repeated-other-class", [6], 1),
    "fraction": (changed(k2=pack([0.5, 1.0], picture(2), id=2)), "label-fraction", [2], 1),
    "id": (changed(k2=pack([0, 1.0], picture(2), id=5)), "record-id", [2], 0),
    "header of 3 bytes": (changed(k2=b"abc"), "record-header", [2], 1),
    "no image file": (changed(k2=pack([0, 1.0], b"", id=2)), "record-no-image", [2], 1),
    "range of an identity": (changed(k16=pack([4, 8], b"", id=16)), "identity-gap", [16], 1),
    "range backwards": (changed(k18=pack([15, 13], b"", id=18)), "identity-range", [18], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_record_is_found(tmp_path, name):
    wrong, key, places, expected = WRONG[name]
    status, found = examine(write(tmp_path / "set", wrong))
    also = {"fraction": {"label-range", "identity-mixed"}, "range of an identity": {"identity-mixed"}}
    assert set(found) == {key} | also.get(name, set())
    assert [place["key"] for place in found[key]["places"]] == places
    assert found[key]["count"] == len(places)
    assert status == expected


def test_grey_rows_at_the_end_of_a_good_file(tmp_path):
    image = cv2.imdecode(np.frombuffer(picture(2), np.uint8), cv2.IMREAD_COLOR)
    image[16:] = 128
    grey = cv2.imencode(".png", image)[1].tobytes()
    status, found = examine(write(tmp_path / "set", changed(k2=pack([0, 1.0], grey, id=2))))
    assert (status, set(found)) == (0, {"image-grey-rest"})
    assert found["image-grey-rest"]["places"] == [
        {"key": 2, "class": 0, "problem": "the last 8 of 24 rows are grey"}
    ]


def test_labels_of_another_identity(tmp_path):
    mixed = changed(k2=pack([1, 1.0], picture(2), id=2))
    _, found = examine(write(tmp_path / "mixed", mixed))
    assert set(found) == {"identity-mixed"}
    shifted = {**records(), **{key: pack([3, 1.0], picture(key), id=key) for key in (5, 6, 7)}}
    _, found = examine(write(tmp_path / "shifted", shifted))
    assert {key: f["count"] for key, f in found.items()} == {"identity-number": 1, "class-gap": 1}
    assert found["class-gap"]["places"] == [{"class": 1, "images": 0}]


def test_labels_out_of_range_and_from_1(tmp_path):
    _, found = examine(write(tmp_path / "set", records()), num_classes=3)
    assert set(found) == {"label-range"}
    assert [place["key"] for place in found["label-range"]["places"]] == [13, 14]
    plain = {key: pack(key, picture(key), id=key) for key in (1, 2, 3)}
    _, found = examine(write(tmp_path / "one", {**plain, 4: pack(3, picture(4), id=4)}, "3,24,24\n"))
    assert "Do they count from 1?" in found["label-range"]["what"]


def test_classes_without_one_and_nearly_all_images(tmp_path):
    counts = {0: 1, 2: 2, 3: 250, 4: 2}
    labels = [label for label, count in counts.items() for _ in range(count)]
    plain = {key: pack(label, picture(key, 8), id=key) for key, label in enumerate(labels)}
    status, found = examine(write(tmp_path / "set", plain, "7,8,8\n"), images=False)
    assert status == 0
    classes = {key: [place["class"] for place in f["places"]] for key, f in found.items()}
    assert classes == {"class-gap": [1], "class-unused": [5, 6], "class-one-image": [0], "class-huge": [3]}


def test_one_label_for_all_is_an_error(tmp_path):
    lost = {key: pack(0, picture(key), id=key) for key in range(1, 5)}
    status, found = examine(write(tmp_path / "set", lost))
    assert status == 1
    assert found["label-constant"]["places"] == [{"class": 0, "images": 4}]


def test_the_index_against_the_file(tmp_path):
    """A record is not named, an offset points nowhere, one to no frame, one into a record's middle; one is cut off."""
    folder = write(tmp_path / "set", {**records(), 2: pack([0, 1.0], b"x" * 4 + MAGIC + b"y" * 8, id=2)})
    lines = dict(line.split("\t") for line in (folder / "train.idx").read_text().splitlines())
    offset_2 = int(lines["2"])
    lines["2"] = str(offset_2 + 8 + 24 + 8 + 4)  # the second part of the split record
    lines["5"] = str(int(lines["5"]) + 4)
    lines["6"] = "123456788"
    del lines["7"]
    (folder / "train.idx").write_text("".join(f"{key}\t{offset}\n" for key, offset in lines.items()))
    status, found = examine(folder, images=False)
    assert status == 1
    places = {key: f["places"] for key, f in found.items()}
    assert places["index-part"] == [{"key": 2, "offset": int(lines["2"])}]
    assert places["index-frame"] == [{"key": 5, "offset": int(lines["5"])}]
    assert places["index-offset"] == [{"key": 6, "offset": 123456788}]
    # Nobody names the records of 2, 5, 6 and 7 any more.
    assert found["index-nameless"]["count"] == 4
    assert places["index-nameless"][0] == {"offset": offset_2}

    folder = write(tmp_path / "cut", records())
    size = (folder / "train.rec").stat().st_size
    with open(folder / "train.rec", "r+b") as file:
        file.truncate(size - 12)
    _, found = examine(folder, images=False)
    assert [place["key"] for place in found["record-cut"]["places"]] == [18]


def test_rubbish_between_records_and_a_damaged_length(tmp_path):
    folder = write(tmp_path / "set", records())
    lines = dict(line.split("\t") for line in (folder / "train.idx").read_text().splitlines())
    with open(folder / "train.rec", "ab") as file:
        file.write(b"rubbish!")
    _, found = examine(folder, images=False)
    assert set(found) == {"file-waste"}
    with open(folder / "train.rec", "r+b") as file:
        file.seek(int(lines["3"]) + 4)
        length = int.from_bytes(file.read(4), "little")
        file.seek(int(lines["3"]) + 4)
        file.write((length + 400).to_bytes(4, "little"))
    status, found = examine(folder, images=False)
    assert status == 1
    assert [place["key"] for place in found["record-overlap"]["places"]] == [3]


def test_split_records_are_read_whole(tmp_path):
    content = b"x" * 8 + MAGIC + b"y" * 8 + MAGIC + MAGIC + b"z"
    folder = write(tmp_path / "set", {0: pack(0, content), 1: pack(0, picture(1))})
    ours = Records(folder / "train.rec")
    assert [ours.read(0), ours.read(1)] == [content, picture(1)]
    with RecordReader(folder / "train.rec") as reader:
        assert reader.read(0).endswith(content)
    assert not ours.findings


@pytest.mark.parametrize("text", [None, "0\tx\n", "", "1\t0\n1\t0\n"])
def test_an_index_that_is_missing_or_none_is_an_error(tmp_path, text):
    folder = write(tmp_path / "set", records())
    (folder / "train.idx").unlink()
    if text is not None:
        (folder / "train.idx").write_text(text)
    status, found = examine(folder)
    assert (status, set(found)) == (1, {"set-unreadable"})
    assert "partial-fc data index" in found["set-unreadable"]["what"]


def test_property_against_the_records(tmp_path):
    _, found = examine(write(tmp_path / "a", records(), "5,24,24,15\n"))
    assert set(found) == {"property-classes", "property-images", "class-unused"}
    _, found = examine(write(tmp_path / "b", records(), "four\n"))
    assert set(found) == {"property"}


def test_record_0_that_lies(tmp_path):
    _, found = examine(write(tmp_path / "set", changed(k0=pack([14, 19], b""))))
    assert set(found) == {"identity-record-0"}
    late = {**records(), 19: pack([0, 1.0], picture(19), id=19)}
    _, found = examine(write(tmp_path / "late", late))
    assert [place["key"] for place in found["identity-late-image"]["places"]] == [19]


def test_what_pack_writes_is_good(tmp_path):
    for seed, label in enumerate([0, 0, 1, 1, 2, 2]):
        folder = tmp_path / "in" / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{seed}.jpg").write_bytes(picture(seed))
    for plain in (False, True):
        pack_images(PackOptions(tmp_path / "in", tmp_path / f"out{plain}", image_size=24, plain=plain))
        assert examine(tmp_path / f"out{plain}") == (0, {})
    assert examine(tmp_path / "in") == (0, {})


def test_class_folders(tmp_path, capsys):
    for seed, label in enumerate([0, 0, 0, 2, 2, 2, 3]):
        folder = tmp_path / "in" / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{seed}.jpg").write_bytes(picture(seed))
    (tmp_path / "in/class1").mkdir()
    (tmp_path / "in/class2/4.jpg").write_bytes(picture(0))  # = class0/0.jpg
    (tmp_path / "in/class0/2.jpg").write_bytes(picture(0))
    (tmp_path / "in/class2/5.jpg").write_bytes(b"")
    capsys.readouterr()
    status, found = examine(tmp_path / "in", sheet=tmp_path / "sheet.png")
    assert status == 1
    assert set(found) == {
        "class-gap", "class-one-image", "image-undecodable", "repeated-same-class", "repeated-other-class",
    }  # fmt: skip
    assert found["repeated-other-class"]["places"] == [
        {
            "file": f"{tmp_path}/in/class2/4.jpg",
            "class": 2,
            "same as file": f"{tmp_path}/in/class0/0.jpg",
            "same as class": 0,
        }
    ]
    printed = capsys.readouterr().out
    assert f"    {tmp_path}/in/class2/5.jpg, class 2, problem no image that OpenCV can read" in printed
    sheet = cv2.imread(str(tmp_path / "sheet.png"))
    assert sheet is not None
    assert sheet.shape[1] == 10 * 112


def test_lists(tmp_path):
    (tmp_path / "0.jpg").write_bytes(picture(0))
    (tmp_path / "list").write_text("0.jpg 0\n1.jpg 1\n")
    status, found = examine(tmp_path / "list")
    assert status == 1
    assert found["image-unreadable"]["places"][0]["file"] == f"{tmp_path}/1.jpg"
    (tmp_path / "bad").write_text("0.jpg zero\n")
    _, found = examine(tmp_path / "bad")
    assert set(found) == {"set-unreadable"}
    assert "line 1" in found["set-unreadable"]["what"]


def pairs_of(same: list[bool], replace: dict[int, bytes] | None = None) -> Callable[[Path], Path]:
    images = [picture(i) for i in range(2 * len(same))]
    for i, content in (replace or {}).items():
        images[i] = content

    def write_to(path: Path) -> Path:
        write_pairs(path, images, same)
        return path

    return write_to


HALF = [True, False] * 10
PAIRS = {
    "good": (pairs_of(HALF), {}, 0),
    "one answer": (pairs_of([True] * 20), {"pairs-one-answer": 0}, 1),
    "unbalanced": (pairs_of([True] * 15 + [False] * 5), {"pairs-balance": 0, "pairs-folds": 9}, 0),
    "in two halves": (pairs_of([True] * 10 + [False] * 10), {"pairs-folds": 10}, 0),
    "undecodable": (pairs_of(HALF, {3: b"x"}), {"image-undecodable": 1}, 1),
    "with itself": (pairs_of(HALF, {1: picture(0)}), {"pairs-identical": 1}, 0),
    "with itself, as two": (pairs_of(HALF, {3: picture(2)}), {"pairs-contradict": 1}, 1),
    "twice": (pairs_of(HALF, {4: picture(1), 5: picture(0)}), {"pairs-again": 1}, 0),
    "twice, otherwise": (
        pairs_of(HALF, {6: picture(0), 7: picture(1)}),
        {"pairs-again": 1, "pairs-two-answers": 1},
        1,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(tmp_path, name):
    write_to, expected, exit_status = PAIRS[name]
    status, found = examine(write_to(tmp_path / "test.bin"))
    assert ({key: f["count"] for key, f in found.items()}, status) == (expected, exit_status)


def test_pairs_beside_a_set_that_holds_their_images(tmp_path):
    folder = write(tmp_path / "set", records())
    pairs_of(HALF)(folder / "test.bin")  # pictures 0 to 39; the set has 1 to 14
    status, found = examine(folder)
    assert (status, set(found)) == (0, {"pairs-trained-on"})
    assert [place["image"] for place in found["pairs-trained-on"]["places"]] == list(range(1, 15))
    (folder / "test.bin").write_bytes(b"rubbish")
    assert examine(folder)[0] == 1


def test_idx_files(tmp_path):
    rng = np.random.default_rng(0)
    image_NHW = rng.integers(0, 256, (20, 5, 6), np.uint8)
    label_N = np.tile(np.arange(10, dtype=np.uint8), 2)
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", label_N)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", rng.integers(0, 256, (20, 5, 6), np.uint8))
    write_idx(tmp_path / "train-images-idx3-ubyte", image_NHW)
    assert examine(tmp_path) == (0, {})
    image_NHW[3] = 0
    image_NHW[5] = image_NHW[4]
    write_idx(tmp_path / "train-images-idx3-ubyte", image_NHW)
    status, found = examine(tmp_path)
    assert (status, set(found)) == (1, {"image-constant", "repeated-other-class"})
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", label_N[1:])
    _, found = examine(tmp_path)
    assert "20 images" in found["idx-unreadable"]["what"]


def test_nothing_to_look_at(tmp_path, capsys):
    for source in (tmp_path / "missing", tmp_path):
        assert doctor_data(DataOptions(source, bar=False)) == 2
        assert "expected" in capsys.readouterr().out or source == tmp_path


def test_more_places_than_are_shown(tmp_path, capsys):
    wrong = {key: pack(0, picture(key), id=key) for key in range(1, 9)}
    folder = write(tmp_path / "set", {**wrong, 9: pack(1, picture(9), id=9)}, "2,24,24\n")
    assert examine(folder, num_classes=1, show=1)[1]["label-range"]["count"] == 1
    capsys.readouterr()
    _, found = examine(write(tmp_path / "b", {k: pack(9, picture(k), id=k) for k in range(1, 9)}), show=2)
    assert len(found["label-range"]["places"]) == 8  # all of them, for a program
    assert "    key 2, class 9\n    ... and 6 more\n" in capsys.readouterr().out
