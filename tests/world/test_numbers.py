"""Named sets of vectors, classes that are merged: what other people's sets and habits must give."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from partial_fc import checkpoint
from partial_fc.checkpoint.rows_now import rows_now
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, Heads, PartialFC, draw_labels
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD
from partial_fc.models.vectors import input_of
from partial_fc.train.precision import Precision
from partial_fc.verbs.checkpoint import classes
from recipes.face import heads as face_heads
from recipes.face import tuning as face_tuning
from recipes.face import vectors as face_vectors
from recipes.face.main import DataFlags
from tests.flat import flat_head, learn
from tests.running import train_here
from tests.unit.stored_checkpoints import D, save
from tests.world.rows import Row, table

SETS = {"a": 20, "b": 7}  # classes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.npz with three labels a vector, b.npz with one, and others of the same classes."""
    folder = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    for name, count, number in (("a", 20, 3), ("b", 7, 1), ("held/a", 20, 3), ("held/b", 7, 1), ("all", 27, 1)):
        label_NK = np.stack([(np.arange(3 * count) * (1 + k) + k) % count for k in range(number)], axis=1)
        (folder / name).parent.mkdir(exist_ok=True)
        names = [f"person {n}" for n in range(count)]
        given = {"embeddings": rng.normal(size=(len(label_NK), 8)), "class_names": np.array(names)}
        np.savez(folder / f"{name}.npz", labels=label_NK if number > 1 else label_NK[:, 0], **given)
        if name == "a":
            np.savez(folder / "sorted.npz", labels=label_NK, **given | {"class_names": np.array(sorted(names))})
    (folder / "both.sets").write_text("a a.npz\nb b.npz\n")
    return folder


def opened(folder: Path, rec: str, targets: str, labels: dict[str, int]) -> tuple[Any, Any, DataFlags]:
    data = DataFlags(
        rec=tuple(map(Path, rec.format(folder).split())), val_targets=tuple(targets.format(folder).split())
    )
    source = face_vectors.open_tables(data, labels or 3)
    if labels:
        head: Any = Heads(**{name: PartialFC(count, 8, CosFace(), name=name) for name, count in SETS.items()})
    else:
        head = PartialFC(source.num_classes, 8, CosFace())
    return source, head, data


NAMED = "a={0}/a.npz b={0}/b.npz"


@table(
    [
        Row("labels of each named set", "--labels a=3 b=1", {"a": 3, "b": 1}, [[12, 5, 18], [20, -1, -1]]),
        Row("the first label of each", "the same; --labels a=1 b=1", {"a": 1, "b": 1}, [12, 20]),
        Row("labels of the second set alone", "--labels a=1 b=2", {"a": 1, "b": 2}, [[12, -1], [20, -1]]),
    ]
)
def test_a_named_set_of_vectors_has_its_labels(folder: Path, row: Row) -> None:
    source, _, _ = opened(folder, NAMED, "", row.given)
    assert source.labels()[[12, 60]].tolist() == row.right
    assert source.read_batch(np.array([12, 60]))[1].tolist() == row.right


NAMED_SETS, ONE_SET, TWO_SETS = (f"--val-targets with {what}" for what in ("named sets", "one set", "two sets"))


@table(
    [
        Row("the sets' own files", NAMED_SETS, (NAMED, "{0}/a.npz {0}/b.npz", True), {"a": "a", "b": "b"}),
        Row("a file with its set's name", NAMED_SETS, (NAMED, "b={0}/held/b.npz", True), {"b": "b"}),
        Row("a name beside its set", NAMED_SETS, (NAMED, "b=b a=a", True), {"b": "b", "a": "a"}),
        Row(
            "files of one name", NAMED_SETS, (NAMED, "a={0}/a.npz a={0}/held/a.npz", True), "two files of the name a-a"
        ),
        Row("a file of no set", NAMED_SETS, (NAMED, "{0}/all.npz", True), "--val-targets .*--rec .*a=.*all.npz"),
        Row("a name of no set", NAMED_SETS, (NAMED, "c={0}/all.npz", True), "--val-targets c=.* with --rec"),
        Row("one file", ONE_SET, ("{0}/a.npz", "{0}/held/a.npz", False), {"a": ""}),
        Row("all classes together", TWO_SETS, ("{0}/a.npz {0}/b.npz", "{0}/all.npz", False), {"all": ""}),
        Row(
            "the file of the second set",
            TWO_SETS,
            ("{0}/a.npz {0}/b.npz", "{0}/b.npz", False),
            "class numbers in the file of a set",
        ),
        Row(
            "classes in another order",
            "partial-fc embed of folders",
            ("{0}/a.npz", "{0}/sorted.npz", False),
            "class 2 is 'person 10', 'person 2' in --rec",
        ),
        Row(
            "twice the same name", ONE_SET, ("{0}/a.npz", "{0}/a.npz {0}/held/a.npz", False), "two files of the name a"
        ),
    ]
)
def test_vectors_are_evaluated_by_the_head_of_their_classes(folder: Path, row: Row) -> None:
    rec, targets, several = row.given
    labels = {"a": 3, "b": 1} if several else {}
    source, head, data = opened(folder, rec, targets, labels)
    if isinstance(row.right, str):
        with pytest.raises(ValueError, match=row.right):
            face_vectors.evaluations(data, source, head, labels)
        return
    found = face_vectors.evaluations(data, source, head, labels)
    assert {one.name: one.head.name for one in found} == row.right
    for one in found:
        values = dict(one.run(lambda feat_BD: feat_BD.float(), SingleWorld()))
        assert 0 <= values[f"{one.name}/rank1"] <= values[f"{one.name}/rank5"] <= 1


@table(
    [
        Row(
            "a .sets file with a name",
            "--rec a=both.sets b=b.npz",
            lambda at: face_heads.names_of((Path(f"a={at}/both.sets"), Path(f"b={at}/b.npz"))),
            "--rec a=.*file of sets",
        ),
        Row(
            "labels of one column",
            "draw_labels(label_B, ...)",
            lambda _: draw_labels(torch.arange(4), 2, torch.arange(4), 0),
            r"labels \(4,\)",
        ),
    ]
)
def test_what_names_no_set_and_has_no_columns_is_refused(folder: Path, row: Row) -> None:
    with pytest.raises(ValueError, match=row.right):
        row.given(folder)


def trained(folder: Path, optimizer: Any, catch_up: Any, sub_centres: int) -> PartialFC:
    head = flat_head(40, D, CosFace(8.0), 0.1, optimizer=optimizer, catch_up=catch_up, sub_centres=sub_centres)
    random = torch.Generator().manual_seed(0)
    for step in range(9):
        label_B = torch.randint(40, (3,), generator=random) if step else torch.tensor([4, 6, 9])
        learn(head, torch.randn(3, D, generator=random).requires_grad_(), label_B, lr=0.3 / (1 + step))
    save(folder / "step-00000009", [head], step=9, names=[f"c{n:02d}" for n in range(40)])
    return head


MERGE = "classes merge, after "


@table(
    [
        Row("SGD, exact", MERGE + "--head-catch-up exact", (RowSGD(0.9, 0.05), "exact", 1), 9),
        Row("AdamW, exact", MERGE + "--head-catch-up exact", (RowAdamW(weight_decay=0.2), "exact", 1), 9),
        Row(
            "Adagrad with decay, exact", MERGE + "--head-catch-up exact", (RowAdagrad(weight_decay=0.2), "exact", 1), 9
        ),
        Row("SGD that rests", MERGE + "--head-catch-up none", (RowSGD(0.9, 0.05), "none", 1), None),
        Row("sub-centres", MERGE + "--sub-centres 3", (RowSGD(0.9, 0.05), "exact", 3), "--sub-centres"),
        Row("sub-centres that rest", MERGE + "--sub-centres 2", (RowSGD(0.9, 0.05), "none", 2), "--sub-centres"),
    ]
)
def test_merged_classes_have_the_mean_direction_as_of_the_last_step(tmp_path: Path, row: Row) -> None:
    head = trained(tmp_path, *row.given)
    options = classes.MergeClassesOptions(tmp_path, into="c04", out=tmp_path / "merged", names=("c06",))
    if isinstance(row.right, str):
        with pytest.raises(ValueError, match=row.right):
            classes.merge_classes(options)
        return
    classes.merge_classes(options)
    merged, before = checkpoint.Checkpoint(tmp_path / "merged"), checkpoint.Checkpoint(tmp_path / "step-00000009")
    now = rows_now(before).read(torch.tensor([4]))
    expected_D = normalize(normalize(head.centres[[4, 6]], dim=1).sum(0), dim=0) * head.centres[4].norm()
    for rows in merged.rows(), rows_now(merged):  # nothing is left to catch up
        found = rows.read(torch.tensor([4]))
        torch.testing.assert_close(found["centres"][0], expected_D, atol=1e-6, rtol=1e-5)
        assert found["touched"].item() == (row.right or before.rows().read(torch.tensor([4]))["touched"].item())
        assert all(torch.equal(t, now[name]) for name, t in found.items() if name not in ("centres", "touched"))


@table(
    [
        Row(f"{one}", "checkpoint classes add NAME=FILE.npy", one, 9)
        for one in (RowSGD(0.9, 0.05), RowAdamW(weight_decay=0.2))
    ]
)
def test_an_added_class_has_nothing_to_catch_up(tmp_path: Path, row: Row) -> None:
    head = trained(tmp_path, row.given, "exact", 1)
    np.save(tmp_path / "one.npy", np.eye(D, dtype=np.float32)[:1])
    classes.add(classes.AddOptions(tmp_path, tmp_path / "out", (f"new={tmp_path / 'one.npy'}",)))
    found = checkpoint.Checkpoint(tmp_path / "out")
    stored = checkpoint.Checkpoint(tmp_path / "step-00000009").rows()
    made = stored.created(0, 40).nonzero()[:, 0]
    moved = made[stored.read(made)["touched"][:, 0] > 0]
    for rows in found.rows(), rows_now(found):
        new = rows.read(torch.tensor([40]))
        assert new["touched"].item() == row.right
        expected_D = torch.eye(D)[0] * head.centres[moved].norm(dim=1).median()
        torch.testing.assert_close(new["centres"][0], expected_D, atol=1e-6, rtol=1e-5)


@table(
    [
        Row("a narrow teacher, fp32", "--teacher RUN --network linear", ("fp32", 8), torch.float32),
        Row("a narrow teacher, fp64", "--teacher RUN --precision fp64", ("fp64", 8), torch.float64),
        Row("vectors of another length", "--teacher RUN", ("fp32", 9), r"--teacher: .*\(N, 8\).* not .*\(N, 9\)"),
    ]
)
def test_a_teacher_of_vectors_computes_in_the_precision_of_the_run(folder: Path, tmp_path: Path, row: Row) -> None:
    mode, width = row.given
    root = folder / "run"
    if not root.exists():
        flags = "--network linear --embedding-size 6 --margins None --loss cosface --batch-size 6 --max-steps 1"
        train_here(root, f"--rec {folder}/b.npz --warmup-steps 0 --check-data off {flags}")
    backbone = SimpleNamespace(
        device=torch.device("cpu"), world=SingleWorld(), precision=Precision(mode, torch.device("cpu"))
    )
    network = SimpleNamespace(to_input=input_of(width), embedding_size=6)

    def made() -> Any:
        return face_tuning.teacher(face_tuning.TuningFlags(teacher=root), network, width, backbone)  # type: ignore[arg-type]

    if isinstance(row.right, str):
        with pytest.raises(ValueError, match=row.right):
            made()
        return
    assert made()._forward(torch.ones(2, width)).dtype == row.right
