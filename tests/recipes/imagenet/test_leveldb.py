"""LevelDB: copied once to an LMDB in the user's cache, which all processes read."""

import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from partial_fc.data.decode import decode
from recipes.imagenet.databases import open_database
from tests.recipes.imagenet import databases
from tests.recipes.imagenet.databases import records, write_leveldb
from tests.unit.thread_world import in_world

N = 300
SMALL = {"write_buffer_size": 2**17, "compression": None}  # several tables
plyvel = pytest.importorskip("plyvel")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """300 records of 3 kB and more, in random order, in several tables, the last of them still in the log."""
    items = list(records(N, 32).items())
    random.Random(0).shuffle(items)
    return write_leveldb(tmp_path / "db", items, **SMALL)


def check(path: Path) -> None:
    source = open_database(path, "leveldb", 10)
    assert (len(source), source.kind, source.where(3)) == (N, "LevelDB", f"{path}, key 00000003_3.png")
    for i in np.random.default_rng(0).permutation(N).tolist():
        sample = source.read(i)
        pixels = decode(sample.image) if isinstance(sample.image, bytes) else sample.image
        assert sample.label == i % 10
        np.testing.assert_array_equal(pixels, databases.picture(i, 32, 32))


def test_it_is_copied_once_by_one_of_the_ranks(path: Path, cache: Path, caplog) -> None:
    caplog.set_level("INFO")
    in_world(3, lambda _: check(path))
    check(path)
    assert caplog.text.count("is a LevelDB: it is copied once to an LMDB") == 1
    database = plyvel.DB(str(path))
    database.put(b"9", databases.datum(databases.picture(0), 1))
    database.close()
    assert len(open_database(path, "leveldb", 10)) == N + 1
    assert len([one for one in cache.iterdir() if one.is_dir()]) == 1  # the old copy has made room


def test_one_that_another_process_has_open(path: Path) -> None:
    database = plyvel.DB(str(path))
    with pytest.raises(ValueError, match=r"db cannot be opened as a LevelDB: .*lock .*end the one that has it open"):
        open_database(path, "leveldb", 10)
    database.close()
    check(path)


def test_damage(path: Path, cache: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            open_database(path, "leveldb", 10)
        assert not any(one.is_dir() for one in cache.iterdir())  # nor half a copy

    # Of all tables: one may be left from a compaction that closing the database ended; it is never read, and LevelDB
    # removes it when it opens the database.
    whole = {table: table.read_bytes() for table in path.glob("*.ldb")}
    for table, content in whole.items():
        middle = len(content) // 2
        table.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    fails("db is a damaged LevelDB: .*checksum mismatch")
    for table, content in whole.items():
        table.write_bytes(content[:-1])
    fails("db (is a damaged|cannot be opened as a) LevelDB")
    for table in path.glob("*.ldb"):
        table.unlink()
    fails("db (is a damaged|cannot be opened as a) LevelDB: .*missing files")
    (path / "CURRENT").write_bytes(b"MANIFEST-9\n")
    fails("db (is a damaged|cannot be opened as a) LevelDB: .*MANIFEST-9")


def test_no_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    with pytest.raises(ValueError, match=r" has 0.0 GiB free; .*XDG_CACHE_HOME"):
        open_database(path, "leveldb", 10)


def test_without_plyvel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plyvel", None)
    with pytest.raises(ValueError, match=r"db is a LevelDB .* which needs the package plyvel .*: `pip install"):
        open_database(path, "leveldb", 10)
