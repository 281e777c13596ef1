"""Several labels of a sample: from every kind of file to the loader's batches, and what is wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.data import Loader, Sample, Source, Synthetic, open_source
from partial_fc.data.check.at_start import check_data
from partial_fc.data.labels import NONE
from partial_fc.data.recordio import RecordSource, RecordWriter, pack
from partial_fc.data.sample import LabelOutOfRange
from partial_fc.data.sets.joined import open_sets
from partial_fc.data.sets.tar_shards import write_tar_index
from partial_fc.verbs.data.pack import PackOptions, pack_images
from partial_fc.verbs.doctor.data import DataOptions, doctor_data
from tests.unit.data.shards import write_parquet, write_tar
from tests.unit.doctor_sets import picture, records
from tests.unit.doctor_sets import write as write_set

LABELS = [[3, 0, 5], [1], [2, 4], [6, 6, 1], [5, 2]]
PADDED = [[3, 0, 5], [1, NONE, NONE], [2, 4, NONE], [6, 6, 1], [5, 2, NONE]]
D = 4


def rec(folder: Path, labels: list) -> Path:
    with RecordWriter(folder / "a.rec") as writer:
        for key, of_image in enumerate(labels):
            writer.write(key, pack(of_image[0] if len(of_image) == 1 else of_image, picture(key)))
    return folder / "a.rec"


def files(folder: Path, labels: list) -> list[str]:
    for key in range(len(labels)):
        (folder / f"{key} .jpg").write_bytes(picture(key))
    return [f"{key} .jpg" for key in range(len(labels))]


def plain_list(folder: Path, labels: list) -> Path:
    lines = [f"{name} {','.join(map(str, of))}\n" for name, of in zip(files(folder, labels), labels, strict=True)]
    (folder / "a.txt").write_text("".join(lines))
    return folder / "a.txt"


def lst(folder: Path, labels: list) -> Path:
    texts = ["\t".join(f"{label:f}" for label in of) for of in labels]
    lines = [f"7\t{text}\t{name}\n" for text, name in zip(texts, files(folder, labels), strict=True)]
    (folder / "a.lst").write_text("".join(lines))
    return folder / "a.lst"


def tar(folder: Path, labels: list) -> Path:
    path = write_tar(
        folder / "a.tar", [(str(key), picture(key), json.dumps({"label": of})) for key, of in enumerate(labels)]
    )
    write_tar_index(path)
    return path


def parquet(folder: Path, labels: list, **columns: list) -> Path:
    columns = columns or {"image": [{"bytes": picture(key)} for key in range(len(labels))]}
    return write_parquet(folder / "a.parquet", {**columns, "label": labels})


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, D)).astype(np.float32)


def padded(labels: list) -> np.ndarray:
    most = max(map(len, labels))
    return np.array([[*of, *[NONE] * (most - len(of))] for of in labels])


def npz(folder: Path, labels: list) -> Path:
    np.savez(folder / "a.npz", embeddings=rows(len(labels)), labels=padded(labels))
    return folder / "a.npz"


def npy(folder: Path, labels: list) -> Path:
    np.save(folder / "a.npy", rows(len(labels)))
    np.save(folder / "a.labels.npy", padded(labels))
    return folder / "a.npy"


def parquet_vectors(folder: Path, labels: list) -> Path:
    return parquet(folder, labels, embedding=list(rows(len(labels))))


IMAGES = [rec, plain_list, lst, tar, parquet]
VECTORS = [npz, npy, parquet_vectors]
FORMS = [*IMAGES, *VECTORS]
Write = Callable[[Path, list], Path]


def nothing(sample: Sample, rng: np.random.Generator, out: np.ndarray | None = None) -> np.ndarray:
    return np.zeros(2, np.float32)


def batch(source: Source) -> torch.Tensor:
    """Labels by key."""
    with Loader(source, nothing, batch_size=len(source)) as each:
        found = next(each)
    return found.label_B[found.key_B.argsort()]


@pytest.mark.parametrize("write", FORMS)
def test_every_file_gives_all_labels_or_the_first(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path, LABELS)
    for most in (3, 5):
        source = open_source(path, vectors=True, num_labels=most)
        assert (source.num_labels, source.num_classes) == (most, 7)
        expected = np.pad(PADDED, ((0, 0), (0, most - 3)), constant_values=NONE)
        np.testing.assert_array_equal(source.labels(), expected)
        assert [(sample.label, *sample.more) for sample in map(source.read, range(5))] == list(map(tuple, LABELS))
        np.testing.assert_array_equal(batch(source), expected)
    one = open_source(path, vectors=True)
    assert one.labels().tolist() == batch(one).tolist() == [of[0] for of in LABELS]
    assert {sample.more for sample in map(one.read, range(5))} == {()}


@pytest.mark.parametrize("write", FORMS)
@pytest.mark.parametrize(
    ("index", "labels", "what"),
    [(2, [1, 2, 3, 4], r"4 labels; expected 1 to 3 \(--labels\)"), (1, [9, 2], "label 9; expected")],
)
def test_too_many_labels_and_those_of_no_class_are_named(write, index, labels, what, tmp_path) -> None:
    path = write(tmp_path, [labels if i == index else of for i, of in enumerate(LABELS)])
    where = {rec: f"a.rec, key {index}", tar: "a.tar, offset", plain_list: f"{index} .jpg", lst: f"{index} .jpg"}
    match = rf"(?s){where.get(write, f', row {index}')}.*({what}|class 9)"

    def opened() -> Source:
        return open_source(path, 7, vectors=True, num_labels=3)

    with pytest.raises(ValueError, match=match):
        opened().read(index)
    with pytest.raises(ValueError, match=match):
        check_data(opened(), 7, "quick", SingleWorld(), max_bad_records=9)


@pytest.mark.parametrize(
    ("write", "labels", "match"),
    [
        (rec, [-1.0, -1.0], "key 1: 0 labels; expected 1 to 3"),
        (rec, [1.0, 0.5], "key 1: label 0.5; expected a class number"),
        (rec, [1.0, float("nan")], "key 1: label nan"),
        (rec, [1.0, float("inf")], "key 1: label inf"),
        (plain_list, ["3", "x"], "line 2: expected"),
        (plain_list, ["3", "0.5"], "line 2: expected"),
        (plain_list, ["3", ""], "line 2: expected"),
        (tar, [], "offset.*expected a class number"),
        (tar, [3, -1], "offset.*expected a class number"),
        (tar, [3, 0.5], "offset.*expected a class number"),
        (parquet, [], "row 1: 0 labels"),
        (parquet, [3, None], "1 of its labels are missing"),
        (npz, [], "row 1: 0 labels"),
        (parquet_vectors, [], "row 1: 0 labels"),
    ],
)
def test_what_is_no_list_of_classes_is_named(write, labels, match, tmp_path) -> None:
    with pytest.raises(ValueError, match=match):
        open_source(write(tmp_path, [LABELS[0], labels, *LABELS[2:]]), 7, vectors=True, num_labels=3).labels()


def test_a_run_does_not_begin_with_wrong_labels(tmp_path: Path) -> None:
    """Where labels are read first, and where only some records are."""
    source = RecordSource(rec(tmp_path, [*LABELS, [1, 2, 3, 4]]), 7, 3)
    with pytest.raises(ValueError, match="key 5: 4 labels"):
        check_data(source, 7, "quick", SingleWorld(), max_bad_records=9)
    source.label_bytes = lambda: 1 << 40
    with pytest.raises(ValueError, match=r"(?s)labels-wrong \(1\).*key 5: 4 labels"):
        check_data(source, 7, "quick", SingleWorld(), max_bad_records=9)
    with pytest.raises(LabelOutOfRange, match="key 5: 4 labels"):
        batch(source)


def test_fillers_do_not_count(tmp_path: Path) -> None:
    """Wherever they stand, and beyond the most labels that are asked for."""
    labels = [[NONE, 3, NONE, 5, NONE], [1, 2, NONE, NONE, NONE], [2, NONE, NONE, NONE, 0]]
    for write in (rec, npz):
        source = open_source(write(tmp_path, labels), vectors=True, num_labels=2)
        assert source.labels().tolist() == batch(source).tolist() == [[3, 5], [1, 2], [2, 0]]


def test_records_of_identities_have_one_label(tmp_path: Path) -> None:
    write_set(tmp_path, records())
    assert len(open_source(tmp_path))
    with pytest.raises(ValueError, match=r"identity records.*--labels 2"):
        open_source(tmp_path, num_labels=2)


def test_classes_of_joined_sets(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(rec(tmp_path / name, LABELS))
    paths.append(tmp_path / "two.txt")
    (tmp_path / "two.txt").write_text(f"{tmp_path}/x.jpg 1,0\n")
    source = open_sets(paths, num_labels=3)
    of_b = [[7 + label if label != NONE else NONE for label in of] for of in PADDED]
    assert source.labels().tolist() == [*PADDED, *of_b, [15, 14, NONE]]
    assert (source.num_labels, source.num_classes) == (3, 16)
    assert (source.read(7).label, source.read(7).more) == (9, (11,))
    assert open_sets(paths[:2], shared_classes=True, num_labels=3).labels().tolist() == [*PADDED, *PADDED]
    rec(tmp_path / "b", [*LABELS[:4], [1, 2, 3, 4]])
    (tmp_path / "b" / "property").write_text("7,24,24\n")
    with pytest.raises(LabelOutOfRange, match=r"set a-2: .*b/a\.rec, key 4: 4 labels"):
        open_sets(paths, num_labels=3).read(9)
    with pytest.raises(LabelOutOfRange, match=r"set a-2: .*b/a\.rec, key 4: 4 labels"):
        open_sets(paths, num_labels=3).labels()


def test_each_set_has_its_own_number_of_labels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [tmp_path / "a/a.rec", rec(tmp_path / "b", LABELS)]
    with RecordWriter(paths[0]) as writer:
        for key in range(9):
            writer.write(key, pack([float(key % 4), 3.0], picture(key)))
    named = [Path(f"one={paths[0]}"), Path(f"more={paths[1]}")]
    source = open_sets(named, num_labels={"one": 1, "more": 3})
    of_one, of_more = (
        [[key % 4, NONE, NONE] for key in range(9)],
        np.where(np.array(PADDED) == NONE, NONE, np.add(PADDED, 4)),
    )
    assert source.num_labels == 3
    assert source.labels().tolist() == [*of_one, *of_more.tolist()]
    assert source.set_of(np.array([0, 8, 9, 13])).tolist() == [0, 0, 1, 1]
    with Loader(source, nothing, batch_size=28, labels_drawn=(1, 2)) as loader:
        label_BN = next(loader).label_B
    assert label_BN.shape == (28, 2)
    is_one_B = label_BN[:, 0] < 4
    assert is_one_B.sum() == 18
    assert (label_BN[is_one_B, 1] == NONE).all()
    assert sorted((label_BN[~is_one_B] != NONE).sum(dim=1).tolist()) == sorted(2 * [min(2, len(x)) for x in LABELS])
    with pytest.raises(LabelOutOfRange, match=r"set more: .*b/a\.rec, key 0: 3 labels; expected 1 to 2"):
        open_sets(named, num_labels={"one": 3, "more": 2})


def test_drawn_labels_depend_on_the_position_alone() -> None:
    source = Synthetic(100, 8, 24, num_labels=9)

    def drawn(rank: int, world_size: int, **more: int) -> torch.Tensor:
        size = 12 // world_size
        with Loader(
            source, nothing, batch_size=size, rank=rank, world_size=world_size, labels_drawn=3, **more
        ) as loader:
            return torch.cat([next(loader).label_B for _ in range(4)])

    alone = drawn(0, 1)
    assert alone.shape == (48, 3)
    assert all(len(set(row)) == 3 for row in alone.tolist())
    by_step = torch.stack([drawn(rank, 3).view(4, 4, 3) for rank in range(3)])
    assert sorted(by_step.transpose(0, 1).reshape(48, 3).tolist()) == sorted(alone.tolist())
    assert torch.equal(drawn(0, 1, position=12)[:36], alone[12:])
    first, second = (set(map(tuple, part.sort().values.tolist())) for part in alone.split(24))
    assert first != second
    assert not torch.equal(drawn(0, 1, seed=1), alone)


@pytest.mark.parametrize("write", [plain_list, rec])
def test_labels_are_packed_and_checked(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path, LABELS)
    options = {"source": path, "output": tmp_path / "packed", "image_size": None}
    with pytest.raises(ValueError, match=r"--labels 3.*--plain"):
        pack_images(PackOptions(**options, labels=3))
    pack_images(PackOptions(**options, labels=3, plain=True))
    assert "5 images of 7 classes" in capsys.readouterr().out
    for packed in (tmp_path / "packed", path):
        source = open_source(packed, num_labels=3)
        assert source.labels().tolist() == PADDED
        assert doctor_data(DataOptions(source=packed, labels=3, bar=False)) == 0
        assert "labels (11): 1 to 3 labels each, 2.2 on average" in capsys.readouterr().out
        assert doctor_data(DataOptions(source=packed, labels=2, bar=False)) == 1
        assert "3 labels; expected 1 to 2" in capsys.readouterr().out
    texts = (tmp_path / "packed" / "train.lst").read_text().splitlines()
    assert texts[0].split("\t")[:4] == ["0", "3.000000", "0.000000", "5.000000"]
