"""`partial-fc checkpoint classes`: who stays, stays bit for bit; who is new, starts where its images lie."""

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from partial_fc import checkpoint, models
from partial_fc.checkpoint.class_names import check_class_names
from partial_fc.data import open_source
from partial_fc.data.decode import decode
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.data.sets.joined import open_sets
from partial_fc.head import HardNegatives, PartialFC, RowSGD, Storage
from partial_fc.models.inputs import FACE
from partial_fc.verbs.checkpoint import classes
from partial_fc.verbs.checkpoint.classes import (
    AddOptions,
    ListOptions,
    MatchOptions,
    MergeClassesOptions,
    RemoveOptions,
    RenameOptions,
)
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.flat import flat_head, learn
from tests.unit.stored_checkpoints import D, heads_of, save, whole

NAMES = ["ada", "bob", "cyd", "dov", "eve", "fay", "gus", "hal", "ida", "jon", "kim"]
SIZE = 20


def write_images(root: Path, **counts: int) -> None:
    """Random pictures, by name."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        random = np.random.default_rng(sum(name.encode()))
        for number in range(count):
            cv2.imwrite(str(root / name / f"{number}.png"), random.integers(0, 256, (SIZE, SIZE, 3), np.uint8))


@pytest.fixture(scope="module")
def backbone() -> torch.nn.Module:
    torch.manual_seed(3)
    return models.build("tiny", D, SIZE).eval()


def saved(folder: Path, size: int, backbone=None, names=NAMES, mirror=False, **options) -> list[PartialFC]:
    heads = heads_of(size, **options)
    contract = {"network": "tiny", "embedding_size": str(D), "image_size": str(SIZE), "flip": str(mirror).lower()}
    weights = {} if backbone is None else {"backbone": backbone.state_dict()}
    save(folder, heads, names=names, contract=contract, **weights)
    return heads


def rows_by_name(folder: Path, size: int, **options) -> dict[str, dict[str, torch.Tensor]]:
    """Of the classes that are made, loaded by so many ranks."""
    found = checkpoint.Checkpoint(folder)
    names = found.class_names
    heads = heads_of(size, num_classes=len(names), made=(0,), **options)
    for head in heads:
        found.load_head(head)
    made = torch.cat([head.rows.created(head.rows.start, head.rows.stop) for head in heads])
    rows = whole(heads)
    return {names[i]: {key: t[i] for key, t in rows.items()} for i in made.nonzero().squeeze(1).tolist()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("made", "subs"), [(None, 1), ((0, 2, 3, 9), 1), ((0, 2, 3, 9), 3)])
def test_all_other_rows_stay_bit_for_bit(tmp_path, size, made, subs):
    """Through an addition, a removal, a merger and a renaming; bfloat16 centres, one or three of them a class."""
    options = {"storage": Storage(torch.bfloat16, torch.float32), "sub_centres": subs}
    saved(tmp_path / "a", size, made=made, **options)
    before = rows_by_name(tmp_path / "a", size, **options)
    folders = [tmp_path / name for name in "abcde"]
    classes.add(AddOptions(folders[0], folders[1], ("zoe", "abe")))
    classes.remove(RemoveOptions(folders[1], folders[2], ("bob", "jon")))
    merge = MergeClassesOptions(folders[2], into="dov", out=folders[3], names=("ada",))
    if subs > 1:  # which of them the images are near is not known
        with pytest.raises(ValueError, match=r"--sub-centres.*checkpoint classes remove"):
            classes.merge_classes(merge)
        classes.remove(RemoveOptions(folders[2], folders[3], ("ada",)))
    else:
        classes.merge_classes(merge)
    classes.rename(RenameOptions(folders[3], folders[4], ("cyd=sid",)))
    for folder in folders:
        assert verify(VerifyOptions((folder,))) == 0
    after = rows_by_name(folders[-1], size, **options)
    kept = set(before) - {"bob", "jon", "ada", "dov", "cyd"}
    assert all(same(after[name], before[name]) for name in kept)
    assert same(after["sid"], before["cyd"])
    assert set(after) == kept | {"sid", "dov"}  # the new ones were never made: they start as any does
    found = checkpoint.Checkpoint(folders[-1])
    assert found.class_names == ["abe", "sid", "dov", "eve", "fay", "gus", "hal", "ida", "kim", "zoe"]
    assert len(found.manifest["history"]) == 4


def test_the_map_says_every_number_then_and_now(tmp_path):
    saved(tmp_path / "a", 2)
    classes.add(AddOptions(tmp_path / "a", tmp_path / "b", ("bea",)))
    lines = (tmp_path / "b/class-map.tsv").read_text().splitlines()
    assert lines[:4] == ["old\tnew\tname", "0\t0\tada", "1\t2\tbob", "2\t3\tcyd"]
    assert lines[-2:] == ["10\t11\tkim", "-\t1\tbea"]
    classes.merge_classes(MergeClassesOptions(tmp_path / "b", into="bob", out=tmp_path / "c", names=("ada",)))
    classes.remove(RemoveOptions(tmp_path / "c", tmp_path / "d", ("bea",)))
    merged = (tmp_path / "c/class-map.tsv").read_text().splitlines()
    assert merged[1:4] == ["0\t1\tada", "1\t0\tbea", "2\t1\tbob"]
    removed = (tmp_path / "d/class-map.tsv").read_text().splitlines()
    assert removed[1:3] == ["0\t-\tbea", "1\t0\tbob"]


def mean_direction(backbone, files, mirror: bool) -> torch.Tensor:
    """The formula, image by image: the direction of f(image) + f(mirrored image), then the mean of directions."""
    total = torch.zeros(D, dtype=torch.float64)
    for path in sorted(files):
        image_HW3 = torch.from_numpy(decode(path.read_bytes()))
        feat_D = torch.zeros(D, dtype=torch.float64)
        for picture in [image_HW3, image_HW3.flip(1)] if mirror else [image_HW3]:
            with torch.no_grad():
                feat_D += backbone(FACE(picture.permute(2, 0, 1)[None])).double()[0]
        total += normalize(feat_D, dim=0)
    return normalize(total, dim=0).float()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mirror", [False, True])
def test_new_classes_start_at_the_mean_direction_of_their_images(tmp_path, backbone, size, mirror):
    heads = saved(tmp_path / "a", size, backbone, mirror=mirror)
    write_images(tmp_path / "new", bea=3, liz=1, max=0)
    write_images(tmp_path / "one", pat=2)
    feat_ND = np.random.default_rng(0).normal(size=(4, D)).astype(np.float32)
    np.save(tmp_path / "quin.npy", feat_ND)
    words = (f"pat={tmp_path / 'one/pat'}", f"quin={tmp_path / 'quin.npy'}", "ray")
    classes.add(AddOptions(tmp_path / "a", tmp_path / "b", words, images=tmp_path / "new"))
    after = rows_by_name(tmp_path / "b", size)
    assert set(after) == {*NAMES, "bea", "liz", "pat", "quin"}

    rows = whole(heads)
    length = rows["centres"][rows["touched"].squeeze(1) > 0].norm(dim=1).median()
    expected = {
        "bea": mean_direction(backbone, (tmp_path / "new/bea").iterdir(), mirror),
        "liz": mean_direction(backbone, (tmp_path / "new/liz").iterdir(), mirror),
        "pat": mean_direction(backbone, (tmp_path / "one/pat").iterdir(), mirror),
        "quin": normalize(normalize(torch.from_numpy(feat_ND)).mean(dim=0), dim=0),
    }
    for name, direction_D in expected.items():
        torch.testing.assert_close(after[name]["centres"], direction_D * length, rtol=1e-5, atol=1e-6)
        assert not after[name]["momentum"].any()
        assert after[name]["touched"].item() == heads[0].num_steps  # nothing of the past is caught up


def test_the_other_sub_centres_of_a_new_class_are_start_values(tmp_path):
    saved(tmp_path / "a", 2, sub_centres=3)
    np.save(tmp_path / "e.npy", np.eye(D, dtype=np.float32)[:1])
    classes.add(AddOptions(tmp_path / "a", tmp_path / "b", (f"bea={tmp_path / 'e.npy'}",)))
    centre_RD = rows_by_name(tmp_path / "b", 2, sub_centres=3)["bea"]["centres"]
    assert centre_RD[0, 1:].abs().max() == 0
    # Class 1 of a head that starts: bea's number.
    fresh = flat_head(12, D, heads_of(1)[0].margin, sub_centres=3).centres
    assert torch.equal(centre_RD[1:], fresh[1, 1:])


def test_classes_that_become_one_share_a_direction(tmp_path):
    rows = whole(saved(tmp_path / "a", 2))
    options = MergeClassesOptions(tmp_path / "a", tmp_path / "b", "eve", ("kim", "bob"))
    classes.merge_classes(options)
    after = rows_by_name(tmp_path / "b", 2)["eve"]
    parts = normalize(rows["centres"][[4, 10, 1]])
    expected_D = normalize(parts.sum(dim=0), dim=0) * rows["centres"][4].norm()
    torch.testing.assert_close(after["centres"], expected_D, rtol=1e-5, atol=1e-6)
    assert torch.equal(after["momentum"], rows["momentum"][4])
    assert torch.equal(after["touched"], rows["touched"][4])


def test_matching_a_data_set(tmp_path, backbone):
    heads = saved(tmp_path / "a", 2, backbone, names=NAMES[::-1])  # in another order than folders have
    write_images(tmp_path / "data", **dict.fromkeys(set(NAMES) - {"gus", "ada"}, 1), bea=2, zoe=0)
    classes.match(MatchOptions(tmp_path / "a", data=(tmp_path / "data",), out=tmp_path / "b"))
    source = open_source(tmp_path / "data")
    found = checkpoint.Checkpoint(tmp_path / "b")
    assert found.class_names == source.class_names()
    assert check_class_names(found, source) == []
    after, before = rows_by_name(tmp_path / "b", 2), whole(heads)
    assert set(after) == {*NAMES, "bea"} - {"gus", "ada"}
    for name in set(after) - {"bea"}:
        number = NAMES[::-1].index(name)
        assert same(after[name], {key: t[number] for key, t in before.items()})


def test_matching_a_data_set_whose_classes_are_joined(tmp_path):
    heads = saved(tmp_path / "a", 2)
    path = tmp_path / "data/train.rec"
    path.parent.mkdir()
    with RecordWriter(path) as writer:
        for label in range(len(NAMES)):
            writer.write(label, pack(label, b"image"))
    joined = [NAMES[0] if name == NAMES[3] else name for name in NAMES]
    path.with_name("classes.txt").write_text("\n".join(joined))
    options = MatchOptions(tmp_path / "a", tmp_path / "b", data=(path.parent,))
    with pytest.raises(ValueError, match=f"are both named '{NAMES[0]}'; --shared-classes"):
        classes.match(options)
    classes.match(replace(options, shared_classes=True))
    found = checkpoint.Checkpoint(tmp_path / "b")
    assert found.class_names == [name for name in NAMES if name != NAMES[3]]
    assert check_class_names(found, open_sets(options.data, shared_classes=True)) == []
    after, before = rows_by_name(tmp_path / "b", 2), whole(heads)
    assert same(after[NAMES[0]], {key: t[0] for key, t in before.items()})


def test_classes_without_names_are_called_by_number(tmp_path, capsys):
    saved(tmp_path / "a", 2, names=None, made=(0, 1, 2, 3))
    classes.remove(RemoveOptions(tmp_path / "a", tmp_path / "b", ("1", "10")))
    capsys.readouterr()
    classes.list_classes(ListOptions(tmp_path / "b"))
    assert capsys.readouterr().out.splitlines()[:4] == ["0\t0\t-", "1\t2\t2", "2\t3\t3", "3\t4\t-"]
    classes.add(AddOptions(tmp_path / "b", tmp_path / "c", ("10", "1")))
    assert checkpoint.Checkpoint(tmp_path / "c").class_names[:4] == ["0", "1", "10", "2"]


def test_names_from_files_and_all_names_at_once(tmp_path):
    saved(tmp_path / "a", 1, names=None)
    (tmp_path / "names.txt").write_text("".join(f"{name}\n" for name in NAMES))
    classes.rename(RenameOptions(tmp_path / "a", tmp_path / "b", names_file=tmp_path / "names.txt"))
    assert checkpoint.Checkpoint(tmp_path / "b").class_names == NAMES
    (tmp_path / "some.txt").write_text("ada\nkim\n")
    classes.remove(RemoveOptions(tmp_path / "b", tmp_path / "c", names_file=tmp_path / "some.txt"))
    assert checkpoint.Checkpoint(tmp_path / "c").class_names == NAMES[1:-1]


def test_lists_of_hard_negatives_are_left_out(tmp_path, capsys):
    saved(tmp_path / "a", 1, sample_rate=0.5, hard_negatives=HardNegatives(11, 2))
    classes.remove(RemoveOptions(tmp_path / "a", tmp_path / "b", ("ada",)))
    assert "left out" in capsys.readouterr().out
    assert not list((tmp_path / "b").glob("*hard-negatives*"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (lambda a, b: classes.remove(RemoveOptions(a, b, ("bop",))), "no class 'bop'; there is bob"),
        (lambda a, b: classes.remove(RemoveOptions(a, b, ("ada", "ada"))), "named twice"),
        (lambda a, b: classes.remove(RemoveOptions(a, b, tuple(NAMES))), "11 of 11 classes"),
        (lambda a, b: classes.add(AddOptions(a, b)), "no class to add"),
        (lambda a, b: classes.add(AddOptions(a, b, ("ada",))), "'ada' exists"),
        (lambda a, b: classes.add(AddOptions(a, b, ("x=nowhere.npy",))), "nowhere.npy: no .npy file"),
        (lambda a, b: classes.merge_classes(MergeClassesOptions(a, b, "ada", ("ada",))), "not itself"),
        (lambda a, b: classes.rename(RenameOptions(a, b, ("ada",))), "expected OLD=NEW"),
        (lambda a, b: classes.rename(RenameOptions(a, b, ("ada=bob",))), "classes 0 and 1 are both named 'bob'"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, command, message):
    saved(tmp_path / "a", 1)
    with pytest.raises(ValueError, match=message):
        command(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_is_no_image_or_no_embedding_is_named(tmp_path, backbone):
    saved(tmp_path / "a", 1, backbone)
    write_images(tmp_path / "new", bea=2)
    (tmp_path / "new/bea/2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"bea/2.png: no image that OpenCV can read"):
        classes.add(AddOptions(tmp_path / "a", tmp_path / "b", images=tmp_path / "new"))
    for name, array, message in (
        ("wide", np.ones((2, D + 1), np.float32), r"expected floating \(N, 6\)"),
        ("whole", np.ones((2, D), np.int64), "holds int64"),
        ("nan", np.full((2, D), np.nan), "no mean direction"),
        ("nothing", np.stack([np.ones(D), -np.ones(D)]), "no mean direction"),
        ("code", np.array([{"a": 1}]), "no .npy file of numbers"),
    ):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(ValueError, match=message):
            classes.add(AddOptions(tmp_path / "a", tmp_path / "c", (f"x={tmp_path / name}.npy",)))


@pytest.mark.parametrize("sub_centres", [1, 2])
def test_a_new_class_is_caught_up_on_no_step_from_before_it_was_there(tmp_path, sub_centres):
    """As a start value of step 0 it would be aged by all past decay."""
    options = {"sample_rate": 0.2, "optimizer": RowSGD(0.9, 0.5), "sub_centres": sub_centres, "catch_up": "exact"}
    head = flat_head(len(NAMES), D, **options)
    for step in range(6):
        learn(head, torch.randn(4, D, generator=torch.Generator().manual_seed(step)), torch.arange(4))
    save(tmp_path / "a", [head], names=NAMES, configuration={"network": "tiny"})
    classes.add(AddOptions(tmp_path / "a", tmp_path / "b", ("zoe",)))
    other = flat_head(len(NAMES) + 1, D, **options)
    checkpoint.Checkpoint(tmp_path / "b").load_head(other)
    assert torch.equal(other.centres[-1], flat_head(len(NAMES) + 1, D, sub_centres=sub_centres).centres[-1])
    torch.testing.assert_close(other.centres[:-1], head.centres, rtol=1e-6, atol=0)
