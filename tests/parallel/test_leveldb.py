"""A LevelDB that each process opens through a shadow of its own."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from partial_fc.data.databases import open_database
from partial_fc.data.decode import decode
from partial_fc.data.open import open_on_all
from tests.unit import databases

N = 100


def test_all_ranks_read_the_same_records(world, monkeypatch):
    # One folder for all ranks.
    folder = Path(tempfile.mkdtemp()) if world.rank == 0 else Path()
    name = torch.zeros(200, dtype=torch.uint8)
    name[: len(bytes(folder))] = torch.frombuffer(bytearray(bytes(folder)), dtype=torch.uint8)
    folder = Path(os.fsdecode(bytes(world.broadcast(name, name="folder").tolist()).rstrip(b"\0")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    place = folder / "place"
    if world.rank == 0:
        place.mkdir()
        databases.write_leveldb(folder / "db", databases.records(N).items())
        before = databases.hashes(folder / "db")
    world.barrier(name="written")

    source = open_on_all(lambda: open_database(folder / "db", "leveldb", 10, shadow_place=place, world=world), world)
    for i in (*range(world.rank, N, world.size), *np.random.default_rng(world.rank).permutation(N).tolist()):
        sample = source.read(i)
        pixels = decode(sample.image) if isinstance(sample.image, bytes) else sample.image
        assert sample.label == i % 10
        np.testing.assert_array_equal(pixels, databases.picture(i, 5, 5))
    world.barrier(name="read")
    assert len(list(place.iterdir())) == world.size
    world.barrier(name="seen")
    source.close()
    world.barrier(name="closed")
    if world.rank == 0:
        assert databases.hashes(folder / "db") == before
        assert not list(place.iterdir())
