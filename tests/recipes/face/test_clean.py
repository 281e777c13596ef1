"""`partial-fc data clean`, and training with its changes, anew and from a checkpoint."""

import base64
import re
import shutil
import sys

import cv2
import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import partial_fc
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.rows_now import rows_now
from partial_fc.comm import SingleWorld
from partial_fc.verbs.checkpoint.classes import MatchOptions, match
from partial_fc.verbs.data.clean import CleanOptions, clean
from tests.running import losses, run, train_here, train_several
from tests.world.made import class_folders, write_rec

FLAGS = (
    "--check-data off --image-size 40 --batch-size 8 --network tiny --embedding-size 16 --no-mirror --val-targets "
    "--lr-scheduler constant --warmup-steps 0 "
)
EACH = 8


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Folder of `set`, a .rec where image 8 of class 1 has label 3, class 2 is 2 and 12, and an image is damaged; of a
    run on it; and of a model, which knows the right classes."""
    root = tmp_path_factory.mktemp("noisy")
    files = sorted(class_folders(root / "photos", 12, EACH).rglob("*.jpg"))
    records = [(key, key // EACH, file.read_bytes()) for key, file in enumerate(files)]
    for key in range(2 * EACH, 3 * EACH, 2):
        records[key] = key, 12, records[key][2]
    records[8] = 8, 3, records[8][2]
    records[50] = 50, 6, b"no picture"
    write_rec(root / "set", records)
    (root / "set/classes.txt").write_text("".join(f"name{number}\n" for number in range(13)))
    train_here(root / "run", f"--rec {root}/set {FLAGS} --max-steps 12 --max-bad-records 9")
    train_here(root / "model", f"--rec {root}/photos {FLAGS} --max-steps 40")
    return root


def newest(root):
    return sorted((root / "checkpoints").glob("step-*"))[-1]


def cleaned(noisy, out, **more):
    options = CleanOptions(model=noisy / "model", sets=(noisy / "set",), out=out, **more)
    clean(options, SingleWorld(), torch.device("cpu"))
    return out / "changes.tsv"


def test_the_table_weights_and_page(noisy, tmp_path, capsys):
    table = cleaned(noisy, tmp_path / "out")
    lines = [line.split("\t") for line in table.read_text().splitlines()[3:]]
    assert sorted(line[:4] for line in lines) == [
        ["drop", "50", "6", "-"], ["merge", "-", "12", "2"], ["move", "8", "3", "1"],
    ]  # fmt: skip
    assert "no image" in lines[-1][5] or "cannot be used" in lines[-1][5]
    assert np.flatnonzero(np.load(tmp_path / "out/weights.npy") == 0).tolist() == [8, 50]
    page = (tmp_path / "out/index.html").read_text()
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(pictures) == (4 + 4) + (1 + 4 + 4) + 4  # the damaged one has none
    assert cv2.imdecode(np.frombuffer(base64.b64decode(pictures[0]), np.uint8), cv2.IMREAD_COLOR).shape == (72, 72, 3)
    assert "12 (name12) is 2 (name2)" in page
    printed = capsys.readouterr().out
    assert "of 13 classes: 1 become part of another, 0 become two" in printed
    assert "of 96 images: 1 move to another, 1 are left out" in printed
    for command in re.findall(r"partial-fc .*", printed):
        assert command in page.replace("&#39;", "'")
    with pytest.raises(ValueError, match=r"changes\.tsv exists"):
        cleaned(noisy, tmp_path / "out")


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_table_on_several_ranks(noisy, tmp_path, ranks):
    table = cleaned(noisy, tmp_path / "one", batch_size=16)
    words = ["data", "clean", str(noisy / "model"), str(noisy / "set"), "--out", str(tmp_path / "several")]
    run([sys.executable, "-m", "partial_fc", *words, "--batch-size", "16", "--gpus", str(ranks), "--device", "cpu"])
    assert (tmp_path / "several/changes.tsv").read_bytes() == table.read_bytes()


def test_training_with_the_changes_is_training_on_a_set_that_has_them(noisy, tmp_path):
    """On one rank and on three, stopped and resumed, bit for bit."""
    table = cleaned(noisy, tmp_path / "out")
    source = partial_fc.data.open_source(noisy / "set")
    records = []
    for key in range(96):
        if key != 50:
            label = 1 if key == 8 else 2 if 16 <= key < 24 else key // EACH
            records.append((key, label, bytes(source.read(key).data)))
    right = write_rec(tmp_path / "right", records)
    (right / "classes.txt").write_text("".join(f"name{number}\n" for number in range(12)))
    flags, steps = f"{FLAGS} --balance sqrt", "--max-steps 8 --checkpoint-every 3"
    train_here(tmp_path / "plain", f"--rec {right} {flags} {steps}")
    log = train_here(tmp_path / "changed", f"--rec {noisy}/set --apply {table} {flags} {steps}")
    assert "95 images" in log
    assert losses(tmp_path / "changed") == losses(tmp_path / "plain")
    changed = {tmp_path / "changed3": f"--rec {noisy}/set --apply {table} {flags} {steps}"}
    train_several({tmp_path / "plain3": f"--rec {right} {flags} {steps}", **changed}, 3)
    assert losses(tmp_path / "changed3") == losses(tmp_path / "plain3")
    for name in ("checkpoints/step-00000008", "checkpoints/step-00000006"):
        shutil.rmtree(tmp_path / "changed3" / name)
    (tmp_path / "changed3/result.json").unlink()
    train_several(changed, 3)
    assert losses(tmp_path / "changed3") == losses(tmp_path / "plain3")


def test_a_checkpoint_with_the_changes(noisy, tmp_path):
    """The class that two become has their mean direction; the others are as they were; training goes on."""
    table = cleaned(noisy, tmp_path / "out")
    table.write_text(table.read_text() + "".join(f"split\t{i}\t7\t99\t1\t\n" for i in (56, 57, 58)))
    match(MatchOptions(folder=noisy / "run", out=tmp_path / "start", data=(noisy / "set",), apply=table))
    before, after = Checkpoint(newest(noisy / "run")), Checkpoint(tmp_path / "start")
    assert after.class_names == [*(f"name{number}" for number in range(12)), "name7 (2)"]
    old_CD, new_CD = (rows_now(one).read(range(13))["centres"].double() for one in (before, after))
    torch.testing.assert_close(normalize(new_CD[2], dim=0), normalize(normalize(old_CD[[2, 12]]).sum(0), dim=0))
    others = [number for number in range(12) if number != 2]
    torch.testing.assert_close(new_CD[others], old_CD[others])
    model, source = partial_fc.load(noisy / "run"), partial_fc.data.open_source(noisy / "set")
    mean_D = torch.from_numpy(model.embed([source.read(i).data for i in (56, 57, 58)])).double().sum(0)
    torch.testing.assert_close(normalize(new_CD[12], dim=0), normalize(mean_D, dim=0), atol=1e-6, rtol=0)
    on = f"--rec {noisy}/set --apply {table} {FLAGS} --resume {tmp_path}/start --max-steps 15"
    assert "a new epoch begins" in train_here(tmp_path / "on", on)
    clean(CleanOptions(model=noisy / "run", sets=(noisy / "photos",), out=tmp_path), SingleWorld(), torch.device("cpu"))
    other = MatchOptions(noisy / "run", out=tmp_path / "x", data=(noisy / "photos",), apply=tmp_path / "changes.tsv")
    with pytest.raises(ValueError, match="13 classes, the data 12 before"):
        match(other)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--labels 2", "changes the one label"),
        ("--num-classes 13", "the data and the changes say"),
        ("--rec {0}/photos", "made for other data"),
        ("--rec a={0}/set b={0}/photos", "--apply are for a run with one head"),
    ],
)
def test_bad_input_is_refused(noisy, tmp_path, more, said, capfd):
    table = cleaned(noisy, tmp_path / "out")
    with pytest.raises((ValueError, SystemExit, AssertionError)) as raised:
        train_here(tmp_path / "run", f"--rec {noisy}/set --apply {table} {FLAGS} --max-steps 2 {more.format(noisy)}")
    assert said in f"{raised.value} {capfd.readouterr().err}"


def test_images_without_classes(noisy, tmp_path):
    options = CleanOptions(model=noisy / "run", sets=(noisy / "photos/id000",), out=tmp_path / "out")
    with pytest.raises(ValueError, match="without classes; expected a training set"):
        clean(options, SingleWorld(), torch.device("cpu"))
