"""A run whose classes become others: trained on a folder of class folders, continued on a larger one. In this process:
starting one takes longer than these runs."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from partial_fc import checkpoint
from partial_fc.verbs.checkpoint import classes
from partial_fc.verbs.checkpoint.classes import AddOptions, MatchOptions
from tests.running import train_here

FLAGS = "--network tiny --image-size 20 --embedding-size 8 --batch-size 8 --val-targets --check-data off"


def write_class(folder: Path, name: str, count: int = 6) -> None:
    """One noisy picture, several times."""
    folder = folder / name
    folder.mkdir(parents=True)
    random = np.random.default_rng(sum(name.encode()))
    picture = random.integers(0, 200, (20, 20, 3))
    for number in range(count):
        noisy = picture + random.integers(0, 50, picture.shape)
        cv2.imwrite(str(folder / f"{number}.png"), noisy.astype(np.uint8))


def train(root: Path, data: Path, flags: str) -> str:
    """Returns the run's log."""
    return train_here(root, f"{FLAGS} --rec {data} {flags}")


def rows(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Of one process's checkpoint, by class name."""
    found = checkpoint.Checkpoint(folder)
    (path,) = folder.glob("head-*-classes-*")
    tensors = found.load(path.name)
    return {name: {key: t[i] for key, t in tensors.items()} for i, name in enumerate(found.class_names)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """(data of six classes, the checkpoint of 20 steps on them)."""
    folder = tmp_path_factory.mktemp("classes")
    for name in ("ada", "bob", "cyd", "dov", "eve", "fay"):
        write_class(folder / "data", name)
    train(folder / "run", folder / "data", "--max-steps 20")
    return folder / "data", folder / "run/checkpoints/step-00000020"


def test_classes_are_added_and_training_continues(trained, tmp_path):
    data, old = trained
    assert checkpoint.Checkpoint(old).class_names == ["ada", "bob", "cyd", "dov", "eve", "fay"]
    write_class(tmp_path / "new", "bea")
    write_class(tmp_path / "new", "zoe")
    for folder in (data, tmp_path / "new"):
        for name in sorted(path.name for path in folder.iterdir()):
            (tmp_path / "more").mkdir(exist_ok=True)
            (tmp_path / "more" / name).symlink_to(folder / name)

    # Without: the class numbers would mean other classes.
    message = r"class 1 is 'bob'; it is 'bea' in the data set, which has 8 classes, the checkpoint 6.* classes match"
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "a", tmp_path / "more", f"--max-steps 24 --resume {old}")

    classes.match(MatchOptions(old, tmp_path / "matched", (tmp_path / "more",)))
    classes.add(AddOptions(old, tmp_path / "added", images=tmp_path / "new"))
    before, matched, added = rows(old), rows(tmp_path / "matched"), rows(tmp_path / "added")
    assert set(matched) == set(added) == {*before, "bea", "zoe"}
    for name, row in added.items():
        assert all(torch.equal(row[key], matched[name][key]) for key in row)
        if name in before:
            assert all(torch.equal(row[key], before[name][key]) for key in row)

    printed = train(tmp_path / "a", tmp_path / "more", f"--max-steps 24 --resume {tmp_path / 'added'}")
    assert f"resumed from {tmp_path / 'added'}" in printed
    assert (tmp_path / "a/checkpoints/step-00000024").exists()
    after = checkpoint.Checkpoint(tmp_path / "a/checkpoints/step-00000024")
    assert after.class_names == ["ada", "bea", "bob", "cyd", "dov", "eve", "fay", "zoe"]
    # And better than with new classes that start anywhere, on the same images.
    classes.add(AddOptions(old, tmp_path / "anywhere", ("bea", "zoe")))
    train(tmp_path / "b", tmp_path / "more", f"--max-steps 24 --resume {tmp_path / 'anywhere'}")
    imprinted, anywhere = (
        [float(line.split(",")[1]) for line in (tmp_path / name / "loss.csv").read_text().splitlines()[1:]]
        for name in "ab"
    )
    assert len(imprinted) == len(anywhere) == 4
    assert sum(imprinted) < sum(anywhere)
