"""The source of vectors: files, what is wrong with them, batches, and the check before training."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from partial_fc.comm import SingleWorld
from partial_fc.data.check.at_start import check_data
from partial_fc.data.labels import in_array
from partial_fc.data.loader import Loader
from partial_fc.data.sample import BadRecord, LabelOutOfRange
from partial_fc.data.sets.joined import open_sets
from partial_fc.data.transform import as_stored
from partial_fc.data.vectors import Vectors
from partial_fc.verbs.doctor.data import DataOptions, doctor_data
from tests.unit.data.shards import write_parquet

N, D = 30, 6


def clusters(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)).astype(dtype), rng.permutation(np.arange(N) % 12)


def write(path: Path, row_ND: np.ndarray, label_N: np.ndarray) -> Path:
    if path.suffix == ".npz":
        np.savez(path, embeddings=row_ND, labels=label_N)
    elif path.suffix == ".npy":
        np.save(path, row_ND)
        np.save(path.with_suffix(".labels.npy"), label_N)
    else:
        columns = {"key": list(map(str, label_N)), "label": label_N, "embedding": list(row_ND)}
        write_parquet(path, columns, row_group_size=7)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("suffix", [".npz", ".npy", ".parquet"])
def test_each_format_gives_the_same(suffix, dtype, tmp_path):
    row_ND, label_N = clusters(dtype)
    source = Vectors(write(tmp_path / f"x{suffix}", row_ND, label_N))
    assert (len(source), source.width, source.num_classes) == (N, D, 12)
    np.testing.assert_array_equal(source.labels(), label_N)
    sample = source.read(17)
    assert (sample.label, sample.key, sample.data.dtype.name) == (label_N[17], 17, "float32")
    np.testing.assert_array_equal(sample.data, row_ND[17].astype(np.float32))
    index_B = np.array([29, 0, 3])
    found, label_B, key_B = source.read_batch(index_B)
    np.testing.assert_array_equal(found, row_ND[index_B].astype(np.float32))
    assert (label_B.tolist(), key_B.tolist(), found.dtype.name) == (label_N[index_B].tolist(), [29, 0, 3], "float32")


def test_arrays_are_mapped(tmp_path):
    for suffix in (".npz", ".npy"):
        row_ND = Vectors(write(tmp_path / f"x{suffix}", *clusters())).row_ND
        while isinstance(row_ND.base, np.ndarray):
            row_ND = row_ND.base
        assert isinstance(row_ND, np.memmap)


def test_a_batch_at_once_is_that_of_single_reads(tmp_path):
    """Also with a vector that is replaced by another, and for two ranks."""
    row_ND, label_N = clusters()
    row_ND[5], row_ND[11, 2] = 0, np.nan
    source = Vectors(write(tmp_path / "x.npz", row_ND, label_N))

    def batches(transform, rank: int = 0, world_size: int = 1) -> list[np.ndarray]:
        size = 10 // world_size
        with Loader(source, transform, batch_size=size, rank=rank, world_size=world_size, seed=1) as loader:
            each = [next(loader) for _ in range(6)]
        assert sorted(loader.builder.bad) == [5, 11] or world_size == 2
        return [np.column_stack((one.input_B, one.label_B, one.key_B)) for one in each]

    at_once, singly = batches(as_stored), batches(lambda sample, rng, out=None: sample.data)
    np.testing.assert_array_equal(at_once, singly)
    halves = [np.array(batches(as_stored, rank, 2)) for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), at_once)


def test_what_is_wrong_is_named(tmp_path):
    row_ND, label_N = clusters()

    def wrong(match: str, suffix: str = ".npz", row=row_ND, label=label_N, error=ValueError, **more) -> None:
        with pytest.raises(error, match=match):
            Vectors(write(tmp_path / f"x{suffix}", row, label), **more)

    wrong(r"x\.npz, row \d+: label 1[01]; expected 0 to 9 \(4 such", error=LabelOutOfRange, num_classes=10)
    wrong(r"x\.npy, row 0: label -", ".npy", label=label_N - label_N[0] - 1, error=LabelOutOfRange)
    wrong(r"int64 \(30, 6\); expected floating-point", row=row_ND.astype(int))
    wrong(r"labels are float64 \(30,\)", label=label_N / 2)
    wrong(r"labels are int64 \(29,\)", label=label_N[:29])
    with pytest.raises(ValueError, match=r"gone\.npz not found"):
        Vectors(tmp_path / "gone.npz")
    np.save(tmp_path / "alone.npy", row_ND)
    with pytest.raises(ValueError, match=r"expected .*alone\.labels\.npy"):
        Vectors(tmp_path / "alone.npy")
    np.savez(tmp_path / "other.npz", x=row_ND)
    with pytest.raises(ValueError, match=r"other\.npz has no array embeddings and no labels; it has x"):
        Vectors(tmp_path / "other.npz")
    cut = write(tmp_path / "cut.npz", row_ND, label_N)
    for size in (len(cut.read_bytes()) - 1, 200, 0):
        cut.write_bytes(cut.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"cut\.npz"):
            Vectors(cut)


def test_parquet_without_the_columns(tmp_path):
    for columns in ({"label": [0, 1]}, {"embedding": [[1.0, 2.0], [3.0]], "label": [0, 1]}):
        with pytest.raises(ValueError, match=r"x\.parquet.*embedding"):
            Vectors(write_parquet(tmp_path / "x.parquet", columns))
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"x\.parquet"):
        Vectors(tmp_path / "x.parquet")


def test_the_check_before_training_names_file_and_row(tmp_path):
    row_ND, label_N = clusters()
    row_ND[5], row_ND[11, 2] = 0, np.inf
    source = Vectors(write(tmp_path / "x.npz", row_ND, label_N))
    for index in (5, 11):
        with pytest.raises(BadRecord, match=rf"x\.npz, row {index}: "):
            source.read(index)
    lines = "\n".join(check_data(source, 12, "quick", SingleWorld(), max_bad_records=2))
    assert "2 of 30 vectors have NaN or Inf, or only zeros" in lines
    assert "x.npz, row 5" in lines
    assert "x.npz, row 11" in lines
    with pytest.raises(ValueError, match=r"(?s)2 of 30 vectors.*--max-bad-records.*x\.npz, row 5"):
        check_data(source, 12, "quick", SingleWorld(), max_bad_records=1)
    assert check_data(source, 12, "off", SingleWorld(), max_bad_records=1) == []


def test_a_batch_of_several_files_at_once_is_that_of_single_reads(tmp_path):
    row_ND, label_N = clusters()
    several_NK = np.stack([label_N, np.where(label_N % 2, -1, (label_N + 1) % 12)], axis=1)
    for name, some in (("a", slice(0, 10)), ("b", slice(10, N))):
        write(tmp_path / f"{name}.npy", row_ND[some], several_NK[some])
    for num_labels, shared in ((1, False), (2, False), (2, True)):
        paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
        source = open_sets(paths, None, shared, vectors=True, num_labels=num_labels)
        index_B = np.array([29, 3, 10, 9, 3])
        rows, labels, keys = source.read_batch(index_B)
        singles = [source.read(index) for index in index_B.tolist()]
        np.testing.assert_array_equal(rows, [one.data for one in singles])
        np.testing.assert_array_equal(labels, [in_array(one, num_labels) for one in singles])
        np.testing.assert_array_equal(labels, source.labels()[index_B])
        assert keys.tolist() == index_B.tolist()
    assert len(open_sets([tmp_path / "*.npy"], vectors=True)) == N  # not their labels
    row_ND[20] = np.nan
    write(tmp_path / "b.npy", row_ND[10:], several_NK[10:])
    source = open_sets([tmp_path / "a.npy", tmp_path / "b.npy"], vectors=True)
    assert source.read_batch(np.array([3, 20])) is None
    lines = "\n".join(check_data(source, source.num_classes, "quick", SingleWorld(), max_bad_records=2))
    assert "1 of 30 vectors have NaN or Inf, or only zeros" in lines
    assert "set b: " in lines
    assert "b.npy, row 10" in lines


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_doctor_names_vectors_without_a_direction_and_repeated_ones(suffix, tmp_path, capsys):
    row_ND, label_N = np.tile(clusters("float16")[0], (2, 1)), np.arange(2 * N) % 12
    row_ND[N:] *= -1
    row_ND[5], row_ND[11, 2], row_ND[20], row_ND[28] = 0, np.inf, row_ND[8], row_ND[17]
    path = write(tmp_path / f"x{suffix}", row_ND, label_N)

    def doctor(status: int, *says: str, **options) -> None:
        assert doctor_data(DataOptions(options.pop("source", path), bar=False, **options)) == status
        printed = capsys.readouterr().out
        for pattern in says:
            assert re.search(pattern, printed), (pattern, printed)

    doctor(
        1,
        "vectors, 60 vectors, 12 classes",
        r"vectors \(60\): float16, 6 numbers, of length 0.934 to 3.16",
        "60 read",
        rf"vectors-bad \(2\): .*\n.*x\{suffix}, row 5, class 5, .*only zeros\n.*row 11, class 11, .*NaN or Inf",
        rf"repeated-same-class \(1\): .*\n.*row 20, class 8, equals .*x\{suffix}, row 8",
        r"repeated-other-class \(1\): .*\n.*row 28, class 4, equals .*row 17",
        report=tmp_path / "found.json",
    )
    assert json.loads((tmp_path / "found.json").read_text())["read"] == 60
    doctor(1, r"label-range \(10\)", "0 read", num_classes=10, images=False)
    (tmp_path / "two.sets").write_text(f"a {path}\nb other{suffix}\n")
    write(tmp_path / f"other{suffix}", row_ND[30:33], np.array([0, 1, 7]))
    doctor(
        1,
        "63 vectors, 20 classes",
        r"class-unused \(\d+\): classes have no vector",
        r"repeated-other-class \(4\).*\n.*\n.*set b: ",
        source=tmp_path / "two.sets",
    )
    write(path, row_ND, label_N - 3)
    doctor(1, rf"label-range: .*x\{suffix}, row 0: label -3; expected 0 to 8 \(15 such")
