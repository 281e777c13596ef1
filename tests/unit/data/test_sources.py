"""What the readers of .rec folders, image folders and lists make of good and bad input."""

import shutil
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest

from partial_fc.data import BadRecord, ImageFolder, RecordSource, open_source
from partial_fc.data.decode import decode, fit
from partial_fc.data.recordio import Header, _image_keys, pack, read_property
from partial_fc.embedding.sources import open_images
from tests.unit import doctor_sets
from tests.unit.doctor_sets import records as insightface_records

write = partial(doctor_sets.write, said=None)


def jpeg(value: int, size: int = 8) -> bytes:
    return cv2.imencode(".jpg", np.full((size, size, 3), value, np.uint8))[1].tobytes()


@pytest.mark.parametrize("hole", [None, 3])
def test_insightface_layout(tmp_path: Path, hole: int | None) -> None:
    images = {1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 6: 2}
    expected = {key: label for key, label in images.items() if key != hole}  # its packer leaves out what it cannot read
    identities = {7: [1, 3], 8: [3, 4], 9: [4, 7], 0: [7, 10]}
    records = {key: pack([label, 1], jpeg(key), key) for key, label in expected.items()}
    source = open_source(write(tmp_path, records | {key: pack(ends, b"", key) for key, ends in identities.items()}))
    samples = [source.read(i) for i in range(len(source))]
    assert {sample.key: sample.label for sample in samples} == expected
    assert source.num_classes == 3
    assert source.labels().tolist() == list(expected.values())
    for sample in samples:
        assert isinstance(sample.image, bytes)
        assert decode(sample.image)[0, 0, 0] == sample.key


class BigSet:
    """The records of a set with more images than float32 can count, made up when asked for."""

    rec_path, idx_path = Path("big.rec"), Path("big.idx")

    def __init__(self, num_images: int, num_identities: int) -> None:
        self.first = num_images + 1
        self.keys = np.arange(self.first + num_identities)

    def read_sample(self, key: int) -> tuple[Header, bytes]:
        if key == 0:
            return Header(2, np.float32([self.first, len(self.keys)]), 0, 0), b""
        return Header(2, np.float32([0, self.first]), 0, 0), b"image" if key < self.first else b""


@pytest.mark.parametrize("num_images", [2**24 - 2, 2**24, 2**24 + 1, 17_091_657, 17_091_658, 2**25 + 1, 42_474_557])
def test_first_identity_beyond_float32(num_images: int) -> None:
    keys, num_identities = _image_keys(BigSet(num_images, 360_232))  # type: ignore[arg-type]
    assert (keys[0], keys[-1], len(keys)) == (1, num_images, num_images)
    assert num_identities == 360_232


def test_wrong_identity_headers(tmp_path: Path) -> None:
    records = insightface_records((2, 1, 3))
    write(tmp_path, {key: record for key, record in records.items() if key != 9})
    with pytest.raises(ValueError, match=r"key 0: .* \[7.0, 10.0\], but .* ends with key 8"):
        RecordSource(tmp_path)
    write(tmp_path, records | {9: pack([4, 8], b"")})
    with pytest.raises(ValueError, match=r"key 9: got \[4.0, 8.0\]"):
        RecordSource(tmp_path)
    write(tmp_path, records | {0: pack([6, 10], b""), 9: pack([4, 6], b"")})
    with pytest.raises(ValueError, match="identity records start at 6"):
        RecordSource(tmp_path)


def test_property_that_disagrees_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, insightface_records((2, 1, 3)))
    (tmp_path / "property").write_text("4,112,112")
    assert RecordSource(tmp_path).num_classes == 4
    assert "says 4 classes" in caplog.text
    assert "holds 3 identity records" in caplog.text
    (tmp_path / "property").write_text("many")
    with pytest.raises(ValueError, match="expected `num_classes,height,width`, got 'many'"):
        RecordSource(tmp_path)


def test_bad_labels_and_empty_images_name_the_key(tmp_path: Path) -> None:
    nan = float("nan")
    source = RecordSource(
        write(tmp_path, {1: pack(0, b""), 2: pack(1.5, b"x"), 3: pack(nan, b"x"), 4: b"short"}), num_classes=2
    )
    for index, message in enumerate(["label but no image", "label 1.5", "label nan", "label header cut off"]):
        with pytest.raises(BadRecord, match=f"train.rec, key {index + 1}.*{message}"):
            source.read(index)


def test_folder_and_lists_agree(tmp_path: Path) -> None:
    files = {"b/2.JPG": 1, "b/10.jpg": 1, "a a/x y.png": 0, "c/1.jpeg": 2}
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(3))
    (tmp_path / "b" / "notes.txt").write_text("not an image")
    (tmp_path / "empty").mkdir()
    folder = open_source(tmp_path)
    assert isinstance(folder, ImageFolder)
    assert folder.names == ["a a/x y.png", "b/10.jpg", "b/2.JPG", "c/1.jpeg"]
    assert folder.labels().tolist() == [0, 1, 1, 2]
    assert folder.num_classes == 4  # a class without images is still a class

    (tmp_path / "list.txt").write_text("".join(f"{name} {label}\n" for name, label in files.items()))
    lst = "".join(f"{i}\t{label}.000\t{name}\n" for i, (name, label) in enumerate(files.items()))
    (tmp_path / "list.lst").write_text(lst)
    for name in ("list.txt", "list.lst"):
        listed = open_source(tmp_path / name)
        assert [listed.read(i).label for i in range(4)] == list(files.values())
        assert listed.where(2) == str(tmp_path / "a a/x y.png")
        assert listed.num_classes == 3

    (tmp_path / "c/1.jpeg").unlink()
    with pytest.raises(BadRecord, match=r"c/1.jpeg: not found"):
        folder.read(3)
    (tmp_path / "c/1.jpeg").mkdir()
    with pytest.raises(BadRecord, match=r"c/1.jpeg: Is a directory"):
        folder.read(3)
    for name, words in (("b/2.JPG/x", "Not a directory"), ("y" * 300, "File name too long")):
        (tmp_path / "list.txt").write_text(f"{name} 0\n")
        with pytest.raises(BadRecord, match=f"{name}: {words}"):
            open_source(tmp_path / "list.txt").read(0)


@pytest.mark.parametrize("line", ["a.jpg", "a.jpg x", "a.jpg -1", "a.jpg 0.5", "7"])
def test_bad_list_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "list.txt").write_text(f"b.jpg 0\n{line}\n")
    with pytest.raises(ValueError, match="line 2: expected `path label`"):
        open_source(tmp_path / "list.txt")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not found"):
        open_source(tmp_path / "no")
    with pytest.raises(ValueError, match="0 sub-folders"):
        open_source(tmp_path)


@pytest.mark.parametrize(("height", "width"), [(7, 7), (8, 7), (14, 7), (7, 23), (3, 5), (100, 61), (1, 1)])
def test_fit_gives_the_middle_square(height: int, width: int) -> None:
    image = np.zeros((height, width, 3), np.uint8)
    image[:, width // 2 :] = 255
    out = fit(image, 7)
    assert out.shape == (7, 7, 3)
    if width > 1:  # the edge in the middle stays in the middle
        assert abs(out[..., 0].mean(axis=0).mean() / 255 - 0.5) < 0.15


def test_image_size_of_the_property_file(tmp_path: Path) -> None:
    """As far as it says so, in the ways that people write it."""
    for text, size in (("40,112,96", (112, 96)), ("40, 112 ,96,7\n", (112, 96)), ("40", None), ("40,x,96", None)):
        (tmp_path / "property").write_text(text)
        assert read_property(tmp_path / "property") == (40, size)


def test_images_to_embed_that_lie_beside_the_folders_are_left_out_as_for_training(tmp_path):
    for name in ("ada/1.png", "ada/2.png", "loose.png", "empty/readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    source = open_images([tmp_path])
    assert [source.key(index) for index in range(len(source))] == ["ada/1.png", "ada/2.png"]
    assert source.left_out_text().startswith("1 .txt, 1 beside the class folders; ")
    shutil.rmtree(tmp_path / "ada")
    flat = open_images([tmp_path])
    assert [flat.key(index) for index in range(len(flat))] == ["loose.png"]
