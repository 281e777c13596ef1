"""Opening an image database: by what lies at a path, in one process or in all of a run."""

import json
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from partial_fc.data.databases.source import DatabaseSource, Store
from partial_fc.data.image_folder import image_names
from partial_fc.files import regular
from partial_fc.this_host import identity

if TYPE_CHECKING:
    from partial_fc.comm import World

Kind = Literal["lmdb", "leveldb", "minidb"]

_LMDB_MAGIC, _LMDB_MAGIC_AT = b"\xde\xc0\xef\xbe", 16
_PATIENCE_S = 10  # for which a rank waits before it tells the others that it is still listing keys


def open_database(
    path: str | os.PathLike[str],
    db_type: Kind | None,
    num_classes: int,
    *,
    shadow_place: Path | None = None,
    world: "World | None" = None,
) -> DatabaseSource:
    """The records at a path, which all have labels below num_classes. db_type: what the caller takes it for; None:
    whatever lies there. shadow_place: a folder for what opening a LevelDB writes.

    world: of a run of several processes, in which one of each host then reads a LevelDB for all there. A collective,
    also where it fails: raises ValueError or OSError on the ranks that cannot open it (`open_on_all` tells the others).
    """
    path = Path(path)
    if world is None or world.size == 1:
        return DatabaseSource(_open(path, kind_of(path, db_type), shadow_place), num_classes)
    return DatabaseSource(_open_in_world(path, db_type, shadow_place, world), num_classes)


def kind_of(path: Path, db_type: Kind | None = None) -> Kind:
    """What lies at a path. Raises ValueError where it is no database, or not what db_type says."""
    kind = _kind(path)
    if db_type not in (None, kind):
        raise ValueError(f"{path} is a {_NAMES[kind]}, --db_type says {db_type}; give --db_type {kind}")
    return kind


_NAMES = {"lmdb": "LMDB", "leveldb": "LevelDB", "minidb": "minidb file"}


def _kind(path: Path) -> Kind:
    expected = "expected an LMDB (a folder with data.mdb), a LevelDB (one with CURRENT) or a minidb file"
    if not path.exists():
        raise ValueError(f"{path} not found; {expected}")
    if (path / "data.mdb").is_file():
        return "lmdb"
    if (path / "CURRENT").is_file():
        return "leveldb"
    if path.is_file():
        with open(path, "rb", opener=regular) as file:
            head = file.read(_LMDB_MAGIC_AT + 4)
        if path.suffix == ".rec":
            raise ValueError(f"{path} holds MXNet's records; {expected}: `partial-fc data lmdb {path} OUT` makes one")
        return "lmdb" if head[_LMDB_MAGIC_AT:] == _LMDB_MAGIC else "minidb"
    if any(path.glob("MANIFEST-*")) or any(path.glob("*.ldb")):
        raise ValueError(f"{path} has LevelDB's files but no CURRENT: it was not copied as a whole")
    entries = sorted(entry for entry in path.iterdir() if entry.is_dir())
    if image_names(path) or any(image_names(entry) for entry in entries[:10]) or (path / "train.rec").exists():
        raise ValueError(
            f"{path} is a folder of images or records; {expected}: `partial-fc data lmdb {path} OUT` makes one. "
            "(Recipe face reads it as it is, --rec.)"
        )
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
    raise ValueError(f"{path} is a folder with {found}; {expected}")


def _open(path: Path, kind: Kind, shadow_place: Path | None) -> Store:
    if kind == "lmdb":
        from partial_fc.data.databases.lmdb_store import LmdbStore

        return LmdbStore(path)
    if kind == "minidb":
        from partial_fc.data.databases.minidb_store import MinidbStore

        return MinidbStore(path)
    from partial_fc.data.databases.leveldb_store import LevelDbStore

    return LevelDbStore(path, shadow_place)


def _open_in_world(path: Path, db_type: Kind | None, shadow_place: Path | None, world: "World") -> Store:
    problem: Exception | None = None
    kind, reader, address = None, None, ""
    try:
        kind = kind_of(path, db_type)
        if kind == "leveldb" and world.local_size > 1 and world.local_rank == 0:
            from partial_fc.data.databases.leveldb_reader import Reader

            reader = Reader(path, shadow_place)
            address = reader.address
    except (ValueError, OSError) as error:
        problem = error
    host = identity()
    addresses = _gather({"host": host, "local_rank": world.local_rank, "address": address}, world)

    def opened() -> Store:
        if problem:
            raise problem
        assert kind is not None
        if kind != "leveldb" or world.local_size == 1:
            return _open(path, kind, shadow_place)
        from partial_fc.data.databases.leveldb_reader import RemoteStore

        # Of several with this host's name, the one that came with this process.
        before = [entry for entry in addresses[: world.rank + 1] if entry["host"] == host and entry["local_rank"] == 0]
        first = next(
            entry for entry in (*before[::-1], *addresses) if entry["host"] == host and entry["local_rank"] == 0
        )
        if not first["address"]:
            raise ValueError(f"{path}: local rank 0 of {socket.gethostname()} cannot read it for this process")
        return RemoteStore(path, first["address"], reader)

    pool = ThreadPoolExecutor(1)
    opening = pool.submit(opened)
    pool.shutdown(wait=False)  # where the others give up, this rank need not list to the end
    _wait_together(opening, world)
    return opening.result()


def _wait_together(opening: Future, world: "World") -> None:
    """Until all ranks are ready. Listing keys may take longer than a collective may (--comm-timeout)."""
    import torch  # here and below, and not above: who opens a database alone does without torch, which takes seconds

    while True:
        wait([opening], timeout=_PATIENCE_S)
        busy = torch.tensor([0 if opening.done() else 1])
        if not int(world.all_reduce(busy, op="max", name="data/listing")):
            return


def _gather(entry: dict, world: "World") -> list[dict]:
    """What each rank says, in the order of the ranks."""
    import torch

    line = np.frombuffer((json.dumps(entry) + "\n").encode(), np.uint8).copy()
    gathered = world.all_gather(torch.from_numpy(line), name="data/readers").numpy().tobytes()
    return [json.loads(text) for text in gathered.decode().splitlines()]
