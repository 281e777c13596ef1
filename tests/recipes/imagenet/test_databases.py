"""Image databases as sources: what lies at a path, and LMDB; LevelDB is in test_leveldb.py."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from partial_fc.data import BadRecord
from partial_fc.data.decode import decode
from partial_fc.data.sample import LabelOutOfRange
from recipes.imagenet.databases import DatabaseSource, open_database
from tests.recipes.imagenet import databases
from tests.recipes.imagenet.databases import records, write_leveldb, write_lmdb

N = 30


def check(source: DatabaseSource, indices: range | list[int] = range(N)) -> None:
    assert (len(source), source.num_classes, source.labels()) == (N, 10, None)
    for i in indices:
        sample = source.read(i)
        pixels = decode(sample.image) if isinstance(sample.image, bytes) else sample.image
        assert (sample.label, sample.key) == (i % 10, i)
        np.testing.assert_array_equal(pixels, databases.picture(i, 5, 5))


def test_mixed_records_of_an_lmdb(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", records(N))
    (path / "lock.mdb").unlink()
    source = open_database(path, "lmdb", 10)
    check(source)
    check(source, np.random.default_rng(0).permutation(N).tolist())
    assert source.where(3) == f"{path}, key 00000003_3.png"
    check(open_database(path, None, 10))  # a second time in this process
    check(open_database(path / "data.mdb", "lmdb", 10))
    assert [file.name for file in path.iterdir()] == ["data.mdb"]


def test_lmdb_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", records(N))
    source = open_database(path, "lmdb", 10)
    code = f"from tests.recipes.imagenet.databases import *; write_lmdb({str(path)!r}, {{b'0': b'new'}})"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ValueError, match="was written to"):
        source.read(3)


def test_labels_beyond_the_classes(tmp_path: Path) -> None:
    source = open_database(write_lmdb(tmp_path / "db", records(N)), "lmdb", 9)
    with pytest.raises(LabelOutOfRange, match=r"key 00000009_9.png: label 9; expected 0 to 8 .--num_labels") as error:
        source.read(9)
    assert error.value.label == 9
    assert not isinstance(error.value, BadRecord)


def test_a_bad_record_names_its_key(tmp_path: Path) -> None:
    source = open_database(write_lmdb(tmp_path / "db", {**records(N), b"00000004_4.png": b"\x08"}), "lmdb", 10)
    with pytest.raises(BadRecord, match=r"db, key 00000004_4.png: 1 bytes that begin as a Datum"):
        source.read(4)


def fails(path: Path, message: str, db_type=None) -> None:
    with pytest.raises(ValueError, match=message):
        open_database(path, db_type, 10)


def test_what_is_no_leveldb(tmp_path: Path) -> None:
    fails(write_leveldb(tmp_path / "level", records(3).items()), "is a LevelDB, --db_type says lmdb", "lmdb")
    (tmp_path / "level/CURRENT").unlink()
    fails(tmp_path / "level", "no CURRENT")
    fails(write_leveldb(tmp_path / "empty", []), "is an empty LevelDB: it has no record")


def test_what_is_no_database(tmp_path: Path) -> None:
    fails(tmp_path / "none", "not found; expected an LMDB")
    fails(write_lmdb(tmp_path / "lmdb", records(3)), "is a LMDB, --db_type says leveldb", "leveldb")
    fails(write_lmdb(tmp_path / "empty", {}), "is an empty LMDB: it has no record")
    (tmp_path / "images/a").mkdir(parents=True)
    (tmp_path / "images/a/1.png").write_bytes(databases.png(databases.picture(1)))
    fails(tmp_path / "images", "folder of images or records; .*`partial-fc data lmdb .*images OUT` makes one")
    fails(tmp_path / "images/a/1.png", "no image database; it is a PNG picture; expected an LMDB")
    (tmp_path / "mini").write_bytes(b"\x0e\0\0\0\x09\0\0\0" + b"00000000_1.png" + b"\x0a\x07picture")
    fails(tmp_path / "mini", "minidb file of Caffe2, whose convert_db makes an LMDB")
    (tmp_path / "other").mkdir()
    fails(tmp_path / "other", "a folder with nothing")
    (tmp_path / "other/data.mdb").write_bytes(bytes(10000))
    fails(tmp_path / "other", "cannot be opened as an LMDB")


def test_lmdb_that_is_cut_short(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", records(N))
    with (path / "data.mdb").open("r+b") as file:
        file.truncate(12288)
    with pytest.raises(ValueError, match=r"its pages need .* cut short"):
        open_database(path, "lmdb", 10)
