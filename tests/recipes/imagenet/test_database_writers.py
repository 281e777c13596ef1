"""`partial-fc data lmdb`, read back by the libraries and by messages of the tests' own."""

from pathlib import Path
from typing import Any

import cv2
import lmdb
import numpy as np
import pytest

from demo.make_digits import write_idx
from partial_fc.data.decode import decode
from partial_fc.verbs.data.pack import PackOptions, pack_images
from recipes.imagenet.databases import open_database
from recipes.imagenet.databases.records import BYTE, INT32, STRING, Datum, TensorProtos
from recipes.imagenet.databases.write import lmdb_writer
from recipes.imagenet.make_database import DatabaseOptions, make_lmdb
from tests.recipes.imagenet import databases
from tests.recipes.imagenet.databases import records, write_leveldb
from tests.unit.verbs.test_pack import make_images

COUNTS = [2, 0, 3, 1]
LABELS = [0, 0, 2, 2, 2, 3]


def stored(path: Path) -> dict[bytes, bytes]:
    with lmdb.open(str(path), readonly=True, lock=False) as environment, environment.begin() as transaction:
        return dict(transaction.cursor())


def make(source: Path, output: Path, **options: Any) -> dict[bytes, bytes]:
    make_lmdb(DatabaseOptions(source, output, **options))
    return stored(output)


def test_folder_to_datum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "in", COUNTS)
    found = make(tmp_path / "in", tmp_path / "a/out")
    assert [file.name for file in sorted((tmp_path / "a").rglob("*"))] == ["out", "classes.txt", "data.mdb"]
    assert (tmp_path / "a/out/classes.txt").read_text().split() == [f"class{i}" for i in range(4)]
    assert list(found)[2] == b"00000002_class2/0.png"
    for (key, value), label in zip(found.items(), LABELS, strict=True):
        datum = Datum.FromString(value)
        assert (datum.label, datum.encoded) == (label, True)
        assert datum.data == (tmp_path / "in" / key.decode()[9:]).read_bytes()
    assert "6 images; --num_labels 4" in capsys.readouterr().out


@pytest.mark.parametrize("format", ["datum", "tensorprotos"])
def test_raw_pixels_of_another_size(tmp_path: Path, format: Any) -> None:
    (tmp_path / "in/a").mkdir(parents=True)
    rgb = databases.picture(0, 20, 31)
    cv2.imwrite(str(tmp_path / "in/a/1.png"), rgb[..., ::-1])
    (value,) = make(tmp_path / "in", tmp_path / "out", format=format, raw=True, size=10).values()
    expected = cv2.resize(rgb[..., ::-1].copy(), (15, 10), interpolation=cv2.INTER_AREA)  # BGR; 15.5 is rounded down
    if format == "datum":
        datum = Datum.FromString(value)
        assert (datum.channels, datum.height, datum.width, datum.encoded) == (3, 10, 15, False)
        found = np.frombuffer(datum.data, np.uint8).reshape(3, 10, 15).transpose(1, 2, 0)
    else:
        image, label = TensorProtos.FromString(value).protos
        assert (image.data_type, list(image.dims), label.data_type) == (BYTE, [10, 15, 3], INT32)
        assert list(label.int32_data) == [0]
        found = np.frombuffer(image.byte_data, np.uint8).reshape(10, 15, 3)
    np.testing.assert_array_equal(found, expected)


def test_list_and_rec_as_tensors(tmp_path: Path) -> None:
    make_images(tmp_path / "in", COUNTS)
    (tmp_path / "list").write_text("class2/0.png 7\nclass0/1.png 1\n")
    found = make(tmp_path / "list", tmp_path / "out", root=tmp_path / "in", format="tensorprotos")
    assert list(found) == [b"00000000_class2/0.png", b"00000001_class0/1.png"]
    image, label = TensorProtos.FromString(found[b"00000000_class2/0.png"]).protos
    assert (image.data_type, list(label.int32_data)) == (STRING, [7])
    assert image.string_data[0] == (tmp_path / "in/class2/0.png").read_bytes()
    pack_images(PackOptions(tmp_path / "in", tmp_path / "rec", image_size=None))
    found = make(tmp_path / "rec", tmp_path / "out2")
    assert [Datum.FromString(value).label for value in found.values()] == LABELS
    assert decode(Datum.FromString(found[b"00000003"]).data)[0, 0, 0] == 7 * 3


def test_idx_files(tmp_path: Path) -> None:
    image_NHW = np.random.default_rng(0).integers(0, 256, (3, 6, 6), np.uint8)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", image_NHW)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.array([3, 1, 2], np.uint8))
    for number, options in enumerate(({}, {"raw": True}, {"raw": True, "format": "tensorprotos"})):
        make(tmp_path, tmp_path / str(number), **options)
        source = open_database(tmp_path / str(number), "lmdb", 10)
        for i in range(3):
            sample = source.read(i)
            pixel = decode(sample.image) if isinstance(sample.image, bytes) else sample.image
            assert pixel.shape == (6, 6, 1 if number else 3)
            np.testing.assert_array_equal(pixel[..., 0], image_NHW[i])
        assert source.read(1).label == 1


def test_leveldb_to_lmdb(tmp_path: Path) -> None:
    items = records(20)
    path = write_leveldb(tmp_path / "level", items.items())
    assert make(path, tmp_path / "lmdb") == items
    other = make(path, tmp_path / "tensors", format="tensorprotos")
    assert list(other) == list(items)
    for i, value in enumerate(other.values()):
        assert list(TensorProtos.FromString(value).protos[1].int32_data) == [i % 10]


def test_shuffled_by_a_seed(tmp_path: Path) -> None:
    make_images(tmp_path / "in", [30])
    names = []
    for number, seed in enumerate((1, 1, 2)):
        found = list(make(tmp_path / "in", tmp_path / str(number), shuffle=True, seed=seed))
        assert [int(key[:8]) for key in found] == list(range(30))
        names.append([key[9:] for key in found])
    assert names[0] == names[1] != names[2]
    assert sorted(names[0]) == sorted(names[2])


def test_bad_images(tmp_path: Path) -> None:
    make_images(tmp_path / "in", COUNTS)
    (tmp_path / "in/class2/1.png").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"class2/1.png: no image.*--max-bad-records"):
        make_lmdb(DatabaseOptions(tmp_path / "in", tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))
    make_lmdb(DatabaseOptions(tmp_path / "in", tmp_path / "out", max_bad_records=1))
    assert len(open_database(tmp_path / "out", None, 4)) == 5
    with pytest.raises(ValueError, match="exists; remove it"):
        make_lmdb(DatabaseOptions(tmp_path / "in", tmp_path / "out"))


def test_a_key_that_comes_twice(tmp_path: Path) -> None:
    with lmdb_writer(tmp_path / "out") as put:
        put(b"b", b"1")
        put(b"a", b"2")
        with pytest.raises(ValueError, match="two records have the key b"):
            put(b"b", b"3")
