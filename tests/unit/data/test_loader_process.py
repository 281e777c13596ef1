"""A process that builds the batches: the same bits, the same errors, and no process left."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partial_fc.data import Batch, Loader, SquareImage, open_source
from partial_fc.data.idx import IdxSource
from partial_fc.data.loader_process import LoaderProcess, _Buffer
from partial_fc.data.sample import LabelOutOfRange, Source
from partial_fc.data.sets.joined import open_sets
from partial_fc.data.sets.tar_shards import write_tar_index
from partial_fc.data.transform import ShortSideCrop, as_stored, training_square
from recipes.imagenet.databases import open_database
from tests.recipes.imagenet.databases import records as database_records
from tests.recipes.imagenet.databases import write_lmdb
from tests.recipes.launchers.test_spawn import wait_for_end
from tests.unit import doctor_sets
from tests.unit.data.shards import write_tar
from tests.unit.data.test_idx import by_the_format


@pytest.fixture
def rec(tmp_path: Path) -> Path:
    """With two damaged records."""
    records = doctor_sets.records()
    records |= {key: records[key][:40] for key in (5, 9)}
    return doctor_sets.write(tmp_path / "rec", records)


def loader(source: Source, mode: Any, transform: Any = training_square(24, "face", True), **more: Any) -> Loader:  # noqa: B008
    return Loader(source, transform, mode=mode, **{"batch_size": 6, "num_workers": 2, "seed": 3, **more})


def taken(batches: Loader, count: int) -> list[Batch]:
    """... as they are when they are returned: their memory is used again."""
    copied = [[t.clone() if isinstance(t, torch.Tensor) else t for t in next(batches)] for _ in range(count)]
    return [Batch(*fields) for fields in copied]


def assert_equal(one: list[Batch], other: list[Batch]) -> None:
    for mine, its in zip(one, other, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert mine.input_B.stride() == its.input_B.stride()


@pytest.mark.parametrize(("num_workers", "world_size"), [(3, 2), (0, 3)])
def test_the_same_bits_as_threads(rec: Path, caplog: Any, num_workers: int, world_size: int) -> None:
    """... of good and damaged records, for any threads and ranks, after a start and after a seek."""
    source = open_source(rec)
    weights = np.arange(len(source)) / 7
    more = {"rank": world_size - 1, "world_size": world_size, "num_workers": num_workers, "weights": weights}
    with loader(source, "threads", **more) as threads, loader(source, "process", **more) as process:
        assert_equal(taken(process, 9), taken(threads, 9))
        for each in (threads, process):
            each.seek(12 * world_size)
        assert_equal(taken(process, 5), taken(threads, 5))
    named = [record for record in caplog.records if "bad record" in record.message]
    assert {record.name for record in named} == {"partial_fc.data.build"}  # the process has no log of its own
    assert len(named) == 4  # each of two, of both loaders


def sources(folder: Path) -> dict[str, tuple[Source, Any]]:
    rec = doctor_sets.write(folder / "rec", doctor_sets.records())
    photos = doctor_sets.class_folders(folder / "photos", (i % 3 for i in range(9)))
    (folder / "list.txt").write_text("".join(f"photos/class{i % 3}/{i}.jpg {i % 3}\n" for i in range(9)))
    tar = write_tar(folder / "set.tar", [(f"{i}", doctor_sets.picture(i), str(i % 3)) for i in range(9)])
    write_tar_index(tar)
    np.savez(folder / "vectors.npz", embeddings=np.eye(9, 4, dtype=np.float32) + 1, labels=np.arange(9))
    (folder / "idx").mkdir()
    (folder / "idx/train-images-idx3-ubyte").write_bytes(by_the_format(np.arange(36, dtype=np.uint8).reshape(9, 2, 2)))
    (folder / "idx/train-labels-idx1-ubyte").write_bytes(by_the_format(np.arange(9, dtype=np.uint8)))
    square = training_square(24, "photo", True)
    return {
        "rec": (open_source(rec), square),
        "folder": (open_source(photos), square),
        "list": (open_source(folder / "list.txt"), SquareImage(24)),
        "tar": (open_source(tar), square),
        "sets": (open_sets([rec, tar]), square),
        "vectors": (open_source(folder / "vectors.npz", vectors=True), as_stored),
        "idx": (IdxSource(folder / "idx", "train"), as_stored),
        "lmdb": (
            open_database(write_lmdb(folder / "lmdb", database_records(9)), "lmdb", 10),
            ShortSideCrop(5, 4, random=True),
        ),
    }


def test_every_kind_of_set_travels(tmp_path: Path) -> None:
    for kind, (source, transform) in sources(tmp_path).items():
        again, how = pickle.loads(pickle.dumps((source, transform)))
        assert len(again) == len(source), kind
        mine, its = (taken(loader(of, "threads", way), 3) for of, way in ((source, transform), (again, how)))
        assert_equal(mine, its)


class Strange(Exception):  # pickle cannot make it again
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Odd:
    def __call__(self, sample: Any, rng: Any, out: Any = None) -> Any:
        raise Strange(3, 4)


def test_errors_are_those_of_threads(rec: Path) -> None:
    found = []
    for mode in ("threads", "process"):
        with loader(open_source(rec), mode, max_bad_records=1) as batches, pytest.raises(ValueError) as error:
            taken(batches, 20)
        found.append(sorted(str(error.value).splitlines()))
    assert found[0] == found[1]
    assert len(found[0]) == 3  # two records
    again = pickle.loads(pickle.dumps(LabelOutOfRange("no such class", 7)))
    assert (str(again), again.label) == ("no such class", 7)
    with loader(open_source(rec), "process", Odd()) as batches, pytest.raises(ValueError, match="Strange: 3 and 4"):
        next(batches)


def test_a_batch_stays_while_it_is_kept_and_a_killed_process_is_named(rec: Path) -> None:
    with loader(open_source(rec), "process", rank=2, world_size=3, keep=4) as batches:
        kept = [next(batches) for _ in range(4)]
        before = [batch.input_B.clone() for batch in kept]
        time.sleep(0.2)  # the process works ahead as far as it may
        for batch, input_B in zip(kept, before, strict=True):
            assert torch.equal(batch.input_B, input_B)
        workers = batches._workers
        assert isinstance(workers, LoaderProcess)
        workers._process.kill()
        with pytest.raises(ValueError, match=rf"rank 2: process {workers._process.pid}.*killed by SIGKILL.*dmesg"):
            taken(batches, 30)


def test_signals_are_the_trainings_business_and_no_process_is_left(rec: Path) -> None:
    """Ctrl-C reaches all processes of a terminal; the loader's goes on until its training closes it or is killed."""
    program = (
        "import sys\nfrom partial_fc.data import Loader, SquareImage, open_source\n"
        "loader = Loader(open_source(sys.argv[1]), SquareImage(24), batch_size=6, mode='process')\n"
        "next(loader)\nprint(loader._workers._process.pid, flush=True)\nsys.stdin.read()\nnext(loader)\n"
        "print('again', flush=True)\nsys.stdin.read()"
    )
    training = subprocess.Popen(
        [sys.executable, "-c", program, rec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert training.stdout
    pid = int(training.stdout.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(pid, number)
    time.sleep(0.2)
    os.kill(pid, 0)
    training.kill()
    training.wait()
    wait_for_end([pid])


def test_what_does_not_travel_or_fit_is_named(rec: Path) -> None:
    moved = loader(open_source(rec), "process", rank=1, world_size=2)
    (rec / "train.rec").rename(rec / "other.rec")
    with moved, pytest.raises(ValueError, match=r"rank 1: the process .* cannot begin: .*train.rec not found"):
        taken(moved, 40)
    (rec / "other.rec").rename(rec / "train.rec")
    with pytest.raises(ValueError, match=r"--loader process: .*lambda.*--loader threads"):
        loader(open_source(rec), "process", lambda sample, rng, out=None: None)
    buffer = _Buffer(os.memfd_create("test"), 2**40, 8)
    with pytest.raises(ValueError, match=r"8,796,\d\d\d,\d\d\d MB for 8 batches of .* samples of uint8 \(1000,\)"):
        buffer.view(0, 1, (1000,), np.dtype(np.uint8))
