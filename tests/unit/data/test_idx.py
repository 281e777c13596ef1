"""MNIST's files: what is read, and what is said of files that are damaged, swapped or missing."""

import gzip
import struct

import numpy as np
import pytest

from demo.make_digits import write_idx
from partial_fc.data.idx import find, names, read_idx, read_set

IMAGES = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
LABELS = np.array([3, 0, 9, 1, 1], np.uint8)


def by_the_format(array: np.ndarray) -> bytes:
    """The bytes as the format's description has them, written here a second time."""
    kind = b"\0\0\x08" + bytes([array.ndim])
    return kind + b"".join(struct.pack(">I", size) for size in array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "t10k"):
        for name, array in zip(names(split), (IMAGES, LABELS), strict=True):
            (tmp_path / name).write_bytes(by_the_format(array))
    return tmp_path


def test_reads_the_format(folder):
    image_NHW, label_N = read_set(folder, "train")
    np.testing.assert_array_equal(image_NHW, IMAGES)
    np.testing.assert_array_equal(label_N, LABELS)
    assert image_NHW.dtype == np.uint8
    assert label_N.dtype == np.int64


@pytest.mark.parametrize("compressed", [False, True])
def test_writes_what_it_reads(tmp_path, compressed):
    path = tmp_path / ("labels.gz" if compressed else "labels")
    write_idx(path, LABELS)
    np.testing.assert_array_equal(read_idx(path, "labels"), LABELS)
    first = path.read_bytes()
    assert (gzip.decompress(first) if compressed else first) == by_the_format(LABELS)
    write_idx(path, LABELS)
    assert path.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_finds_torchvisions_folder_and_compressed_files(folder, tmp_path):
    raw = tmp_path / "elsewhere" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in names("train"):
        (raw / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
    np.testing.assert_array_equal(read_set(tmp_path / "elsewhere", "train").image_NHW, IMAGES)
    # Compressed or not is seen in the file: a browser that unpacked it kept the name.
    for name in names("train"):
        (raw / f"{name}.gz").write_bytes((folder / name).read_bytes())
    np.testing.assert_array_equal(read_set(tmp_path / "elsewhere", "train").image_NHW, IMAGES)


def test_no_files(tmp_path):
    with pytest.raises(ValueError, match=r"no MNIST files in .*MNIST/raw; expected t10k-images-idx3-ubyte") as error:
        find(tmp_path, "t10k")
    assert "python -m demo digits --out DIR" in str(error.value)
    assert "--data-dir" in str(error.value)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES, None, "has .*train-images-idx3-ubyte but no train-labels-idx1-ubyte or "),
        (IMAGES, LABELS, r"label 2 \(counted from 0\) is 9; expected 0 to 8"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, images, labels, message):
    for name, array in zip(names("train"), (images, labels), strict=True):
        if array is not None:
            (tmp_path / name).write_bytes(by_the_format(array))
    with pytest.raises(ValueError, match=message):
        read_set(tmp_path, "train", num_classes=9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected images, an idx file that starts with 0x00000803; got 0x; it is empty"),
        (struct.pack("<I", 0x803) + bytes(12), "got 0x03080000$"),
        (by_the_format(IMAGES)[:9], "ends after 9 bytes, within its header of 16"),
        (by_the_format(IMAGES)[:-1], "5 x 3 x 2 = 30 bytes, 29 follow; the file is cut off"),
        (by_the_format(IMAGES) + b"x", "30 bytes, 31 follow; the file is too long"),
        (gzip.compress(by_the_format(IMAGES), mtime=0)[:-10], "damaged or cut off"),
        (gzip.compress(by_the_format(IMAGES), mtime=0)[:12] + b"\xff" * 20, "damaged or cut off"),
    ],
)
def test_damaged_images(folder, content, message):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_set(folder, "train")
    assert str(path) in str(error.value)
