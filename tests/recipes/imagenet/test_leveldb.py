"""LevelDB: read through a shadow of each process, with the original left as it is."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from partial_fc.data import BadRecord
from partial_fc.data.decode import decode
from recipes.imagenet.databases import DatabaseSource, open_database
from recipes.imagenet.databases.leveldb_manifest import read_manifest
from recipes.imagenet.databases.leveldb_store import Shadow
from tests.recipes.imagenet import databases
from tests.recipes.imagenet.databases import hashes, records, write_leveldb
from tests.unit.thread_world import in_world

N = 300
SMALL = {"write_buffer_size": 2**17, "compression": None}  # several tables


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where shadows go; the keys' cache is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "place").mkdir()
    yield tmp_path / "place"
    assert not list((tmp_path / "place").iterdir())


def build(path: Path, order: str = "random") -> Path:
    """300 records of 3 kB and more, in several tables, the last of them still in the log."""
    items = list(records(N, 32).items())
    if order == "random":
        random.Random(0).shuffle(items)
    return write_leveldb(path, items, **SMALL)


def check(source: DatabaseSource, indices: list[int] | range = range(N)) -> None:
    assert len(source) == N
    for i in indices:
        sample = source.read(i)
        pixels = decode(sample.image) if isinstance(sample.image, bytes) else sample.image
        assert sample.label == i % 10
        np.testing.assert_array_equal(pixels, databases.picture(i, 32, 32))


@pytest.mark.parametrize("order", ["keys", "random"])
def test_originals_stay_as_they_are(tmp_path: Path, place: Path, order: str) -> None:
    path = build(tmp_path / "db", order)
    manifest = read_manifest(path)
    assert manifest.tables
    assert manifest.logs
    if order == "keys":
        assert manifest.overlapping_bytes == 0
    # Files that MANIFEST does not list, with numbers that it will give out: what a close or a crash leaves.
    last = max(int(file.stem) for file in path.iterdir() if file.stem.isdigit())
    for number in range(last, last + 20):
        if not (path / f"{number:06d}.ldb").exists():
            shutil.copy(manifest.tables[0].path, path / f"{number:06d}.ldb")
    before = hashes(path)
    for file in (*path.iterdir(), path):
        file.chmod(0o555 if file.is_dir() else 0o444)
    source = open_database(path, "leveldb", 10, shadow_place=place)
    (shadow,) = place.iterdir()
    check(source)
    assert {file.name for file in shadow.iterdir() if file.is_symlink()} <= {
        file.name for file in (*(table.path for table in manifest.tables), *manifest.logs)
    }
    source.close()
    assert hashes(path) == before
    path.chmod(0o755)


def test_keys_are_listed_once(tmp_path: Path, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = build(tmp_path / "db")
    for _ in range(2):
        open_database(path, "leveldb", 10, shadow_place=place).close()
    assert caplog.text.count("listing its keys") == 1
    assert "partial-fc data lmdb" in caplog.text
    plyvel = pytest.importorskip("plyvel")
    database = plyvel.DB(str(path))
    database.put(b"9", databases.datum(databases.picture(0), 1))
    database.close()
    source = open_database(path, "leveldb", 10, shadow_place=place)
    assert len(source) == N + 1
    source.close()


def test_a_cache_that_cannot_be_written(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.warns(RuntimeWarning, match="XDG_CACHE_HOME"):
        source = open_database(build(tmp_path / "db"), "leveldb", 10, shadow_place=place)
    check(source, [3])
    source.close()


def test_damage(tmp_path: Path, place: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            open_database(path, "leveldb", 10, shadow_place=place)

    path = build(tmp_path / "db")
    open_database(path, "leveldb", 10, shadow_place=place).close()  # lists the keys
    table = read_manifest(path).tables[0].path
    content = table.read_bytes()
    middle = len(content) // 2
    table.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    source = open_database(path, "leveldb", 10, shadow_place=place)
    messages = {}
    for i in range(N):
        try:
            source.read(i)
        except BadRecord as error:
            messages[i] = str(error)
    assert 0 < len(messages) < 40
    for i, message in messages.items():
        assert f"{path}, record {i} (key" in message
        assert source.where(i) == f"{path}, record {i} (counted from 0)"
    source.close()
    table.write_bytes(content[:-1])
    fails("the MANIFEST says")
    table.unlink()
    fails("is missing, which the MANIFEST lists")
    table.write_bytes(content)
    manifest = read_manifest(path).path
    manifest.write_bytes(manifest.read_bytes() + bytes(4) + b"\x02\x00\x01" + b"\xc8\x01")
    fails("field 200 is not LevelDB's; did RocksDB")
    (path / "CURRENT").write_bytes(b"MANIFEST-9\n")
    fails("CURRENT names b'MANIFEST-9")


def test_place_without_room(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(tmp_path / "db")
    usage = shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    with pytest.raises(ValueError, match=r"place has 0.0 GiB free; .*--leveldb-shadow.*`partial-fc data lmdb"):
        open_database(path, "leveldb", 10, shadow_place=place)
    with pytest.raises(ValueError, match="is not a folder"):
        open_database(path, "leveldb", 10, shadow_place=tmp_path / "none")


def test_shadows_of_dead_processes_are_removed(tmp_path: Path, place: Path) -> None:
    path = build(tmp_path / "db")
    code = (
        "import os, sys; from pathlib import Path; from recipes.imagenet.databases.leveldb_store import LevelDbStore\n"
        "store = LevelDbStore(Path(sys.argv[1]), Path(sys.argv[2])); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path), str(place)]).returncode == -signal.SIGKILL
    (dead,) = place.iterdir()
    living = Shadow(path, place)
    assert list(place.iterdir()) == [living.folder]
    again = Shadow(path, place)
    assert living.folder.exists()
    assert dead.name not in os.listdir(place)
    living.remove()
    again.remove()


def test_each_rank_has_a_shadow_and_the_first_lists_the_keys(tmp_path: Path, place: Path, caplog) -> None:
    caplog.set_level("INFO")
    path = build(tmp_path / "db")
    before = hashes(path)

    def run(world):
        source = open_database(path, "leveldb", 10, shadow_place=place, world=world)
        check(source, list(range(world.rank, N, 3)))
        check(source, np.random.default_rng(world.rank).permutation(N).tolist())
        world.barrier(name="done")
        return source, len(list(place.iterdir()))

    results = in_world(3, run)
    assert [shadows for _, shadows in results] == [3, 3, 3]
    for source, _ in results:
        source.close()
    assert hashes(path) == before
    assert caplog.text.count("listing its keys") == 1
    assert caplog.text.count("was not written in key order") == 1


def test_ranks_that_cannot_open_it(tmp_path: Path, place: Path) -> None:
    """Each says what it met; none waits for another for ever."""
    path = build(tmp_path / "db")
    table = read_manifest(path).tables[0].path
    table.unlink()

    def run(world):
        with pytest.raises(ValueError, match=r"is missing, which the MANIFEST lists") as error:
            open_database(path, "leveldb", 10, shadow_place=place, world=world)
        with pytest.raises(ValueError, match=r"none not found|is missing"):  # on one rank only, as on one host
            open_database(path if world.rank else tmp_path / "none", None, 10, world=world)
        return str(error.value)

    assert len(in_world(3, run)) == 3


def test_without_plyvel(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(tmp_path / "db")
    monkeypatch.setitem(sys.modules, "plyvel", None)
    with pytest.raises(ValueError, match=r"db is a LevelDB, which needs the package plyvel: `pip install"):
        open_database(path, "leveldb", 10, shadow_place=place)


def test_a_store_that_the_garbage_collector_finds(tmp_path: Path) -> None:
    """plyvel alone would end the process with a segmentation fault."""
    path = write_leveldb(tmp_path / "db", records(30).items())
    code = (
        "import gc, sys, pathlib; from recipes.imagenet.databases.leveldb_store import LevelDbStore;"
        "store = LevelDbStore(pathlib.Path(sys.argv[1])); store.item(3); store.item(20);"
        "store.itself = store; del store; gc.collect(); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.stdout == "alive\n", (done.returncode, done.stderr)
