"""Heads with several tables of class centres: every one is in checkpoints, or the head is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from partial_fc import checkpoint
from partial_fc.checkpoint.folders import mark
from partial_fc.checkpoint.read import Damaged
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, CrossEntropy, HardNegatives, PartialFC, Sampling, check_head
from partial_fc.verbs.checkpoint.classes import ListOptions, list_classes
from partial_fc.verbs.checkpoint.inspect import InspectOptions, inspect
from partial_fc.verbs.checkpoint.reshard import ReshardOptions, reshard
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.recipes.two_heads import SIZE, TwoHeads
from tests.unit.stored_checkpoints import one_step
from tests.unit.thread_world import in_world

C, STEP = 23, 3


def head_of(world) -> TwoHeads:
    return TwoHeads(C, world, sampling=Sampling(0.5, hard_negatives=HardNegatives(C, k=2, every=1)))


def taken(head, world) -> checkpoint.Snapshot:
    state = {"w": torch.full((3,), float(head.num_steps))}
    return checkpoint.capture(head.num_steps, state, {}, {}, head, {"position": 9}, world=world)


def trained(world) -> TwoHeads:
    head = head_of(world)
    check_head(head)
    for _ in range(STEP):
        one_step(head, world, C, SIZE)
    return head


def whole(head: TwoHeads, world) -> dict[str, torch.Tensor]:
    """The rows of all ranks, and their lists of hard negatives."""
    rows = {f"{name}/{key}": t for name, table in head.tables().items() for key, t in table.row_state().items()}
    rows |= {f"list/{key}": t for key, t in head.fine.hard_negatives.state().items()}
    return {name: world.all_gather(t, name="rows") for name, t in rows.items()}


def check_equal(found: dict[str, torch.Tensor], size: int) -> None:
    """... to what two ranks have trained. Lists of hard negatives are of use to two ranks only."""
    expected, _ = in_world(2, lambda world: whole(trained(world), world))
    for name, t in found.items():
        assert torch.equal(t, expected[name]) or (size != 2 and name.startswith("list/")), name


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """By two ranks."""
    folder = tmp_path_factory.mktemp("tables") / f"step-{STEP:08d}"
    in_world(2, lambda world: taken(trained(world), world).write(folder, leads=world.rank == 0))
    mark(folder, STEP, range(2))
    return folder


def test_the_files_have_the_tables_names(stored):
    names = {path.name.partition("-classes")[0] for path in stored.glob("head-*")}
    assert names == {f"head-{table}-0000{rank}-of-00002" for table in ("fine", "pairs") for rank in (0, 1)} | {
        f"head-fine-0000{rank}-of-00002-hard-negatives.safetensors" for rank in (0, 1)
    }
    manifest = json.loads((stored / "manifest.json").read_text())
    assert manifest["format"] == 5
    assert manifest["head"] == {"num_steps": STEP}
    assert [(name, t["num_classes"], t["hard_negatives"]) for name, t in manifest["tables"].items()] == [
        ("fine", C, 2),
        ("pairs", (C + 1) // 2, 0),
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_tables_come_back_on_any_number_of_ranks(stored, size):
    def act(world):
        head = head_of(world)
        notes = checkpoint.Checkpoint(stored).load_head(head)
        assert ["start empty" in note for note in notes] == [True] * (size != 2)
        assert head.num_steps == head.fine.num_steps == head.pairs.num_steps == STEP
        return whole(head, world), one_step(head, world, C, SIZE)

    found, loss = in_world(size, act)[0]
    check_equal(found, size)
    expected, _ = in_world(2, lambda world: one_step(trained(world), world, C, SIZE))
    assert loss == expected if size == 2 else loss > 0


def files_of(folder: Path) -> dict[str, bytes]:
    """A checkpoint's files of rows."""
    return {path.name: path.read_bytes() for path in folder.glob("*head-*.safetensors")}


def test_the_tools_keep_every_table(stored, tmp_path, capsys):
    reshard(ReshardOptions((stored,), tmp_path / "three", 3))
    reshard(ReshardOptions((tmp_path / "three",), tmp_path / "one", 1))
    reshard(ReshardOptions((stored,), tmp_path / "two", 2))
    printed = capsys.readouterr().out
    assert printed.count(f"fine: {C} classes, pairs: {(C + 1) // 2} classes") == 3
    for name, lists in (("three", 0), ("one", 0), ("two", 2)):
        assert verify(VerifyOptions((tmp_path / name,))) == 0
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert manifest["format"] == 5
        assert manifest["tables"]["fine"]["hard_negatives"] == lists
        assert (files_of(stored) == files_of(tmp_path / name)) == (lists != 0)
    capsys.readouterr()
    assert inspect(InspectOptions(stored)) == inspect(InspectOptions(stored.parent)) == 0
    printed = capsys.readouterr().out
    assert f"head.fine.num_classes {C}" in " ".join(printed.split())
    assert f"fine: {C} classes" in printed
    with pytest.raises(ValueError, match="the tables 'fine', 'pairs'; expected a checkpoint of a head with one table"):
        list_classes(ListOptions(stored))


@pytest.mark.parametrize("table", ["fine", "pairs"])
def test_a_checkpoint_without_a_file_of_any_table_is_not_whole(stored, tmp_path, capsys, table):
    folder = shutil.copytree(stored, tmp_path / stored.name)
    (path,) = folder.glob(f"head-{table}-00001-*-classes-*")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(Damaged, match=path.name):
        checkpoint.Checkpoint(folder).check_share(0, 1)
    assert verify(VerifyOptions((folder,))) == 1
    path.unlink()
    with pytest.raises(Damaged, match=f"{path.name} is missing"):
        checkpoint.Checkpoint(folder).check_share(0, 1)
    with pytest.raises(ValueError, match=f"table {table}: no file holds classes"):
        checkpoint.Checkpoint(folder).load_head(head_of(SingleWorld()))
    assert verify(VerifyOptions((folder,))) == 1
    assert f"table {table}: no file holds classes" in capsys.readouterr().out


def test_another_heads_tables_are_refused(stored, tmp_path):
    found, world = checkpoint.Checkpoint(stored), SingleWorld()
    one = head_of(world)
    one.tables = one.fine.tables
    for other in (one, PartialFC(C, SIZE, CosFace()), CrossEntropy(C)):
        with pytest.raises(ValueError, match="has the tables 'fine', 'pairs'; this run's head has"):
            found.load_head(other)
    with pytest.raises(ValueError, match=f"num_classes {C} in table fine; this run has {C + 1}"):
        found.load_head(TwoHeads(C + 1, world))
    head = PartialFC(C, SIZE, CosFace())
    checkpoint.capture(1, {}, {}, {}, head, {}, world=world).write(tmp_path, leads=True)
    mark(tmp_path, 1, [0])
    with pytest.raises(ValueError, match="has class centres without a name; this run's head has the tables"):
        checkpoint.Checkpoint(tmp_path).load_head(head_of(world))


@pytest.mark.parametrize("said", [*({"tables": tables} for tables in (None, [], {"../x": {}})), {"head": None}])
def test_a_manifest_that_says_nonsense_of_its_tables_is_refused(stored, said):
    found = checkpoint.Checkpoint(stored)
    found.manifest |= said
    with pytest.raises(ValueError, match=r"manifest\.json says"):
        found.check_share(0, 1)


# ---- heads that are refused


@pytest.mark.parametrize(
    "verb", ["tables", "state", "load", "prepare", "finite", "discard", "scale_gradient", "step", "row_losses"]
)
def test_a_head_without_a_verb_is_refused_by_name(verb):
    lacking = {name: value for name, value in vars(TwoHeads).items() if name != verb and name[:2] != "__"}
    special = {"__init__": TwoHeads.__init__, "__call__": TwoHeads.__call__}
    head = type("Lacking", (), lacking | special)(C, SingleWorld())
    with pytest.raises(ValueError, match=f"head Lacking has no {verb}: it could not be trained and saved"):
        check_head(head)


def test_a_head_whose_tables_would_be_lost_is_refused():
    world = SingleWorld()
    forgets = TwoHeads(C, world)
    forgets.tables = dict
    with pytest.raises(ValueError, match="class centres in its attribute fine that"):
        check_head(forgets)
    twice = TwoHeads(C, world)
    twice.pairs.name = "fine"  # so that one takes the other's place
    with pytest.raises(ValueError, match="class centres in its attribute fine"):
        check_head(twice)
    renamed = TwoHeads(C, world)
    renamed.tables = lambda: {"coarse": renamed.fine, "pairs": renamed.pairs}
    with pytest.raises(ValueError, match="gives 'coarse' for the table with name 'fine'"):
        check_head(renamed)
    listed = TwoHeads(C, world)
    listed.tables = lambda: [listed.fine, listed.pairs]
    with pytest.raises(ValueError, match=r"of head TwoHeads gives .*; expected a dict"):
        check_head(listed)
    silent = TwoHeads(C, world)
    silent.state = lambda: {"scale": torch.ones(1)}
    with pytest.raises(ValueError, match="of head TwoHeads is not JSON"):
        check_head(silent)
    with pytest.raises(ValueError, match="'a/b'"):
        check_head(PartialFC(C, SIZE, CosFace(), name="a/b"))
    for good in (TwoHeads(C, world), PartialFC(C, SIZE, CosFace()), CrossEntropy(C)):
        check_head(good)
        assert not any(bool(table.rows.created(0, table.num_classes).any()) for table in good.tables().values())
