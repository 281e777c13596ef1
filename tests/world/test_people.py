"""What new users met after their first training: searches, tables, messages, help, narrow terminals."""

import contextlib
import csv
import fcntl
import io
import json
import logging
import os
import pty
import re
import shlex
import shutil
import struct
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tqdm import tqdm

from partial_fc import checkpoint, errors, models, pictures, terminal
from partial_fc.comm import SingleWorld
from partial_fc.data.pairs import write_pairs
from partial_fc.errors import UsageError
from partial_fc.evaluate.identification import search
from partial_fc.flags.command_line import parse
from partial_fc.printable import Lines
from partial_fc.train.record import progress as progress_module
from partial_fc.train.record.log import LogFile, StepLine
from partial_fc.train.run import run_recipe
from partial_fc.verbs import train
from partial_fc.verbs.model.embed import EmbedOptions, embed
from partial_fc.verbs.model.evaluate import EvaluateOptions, evaluate
from partial_fc.verbs.model.search import SearchOptions, search_faces
from partial_fc.verbs.report.page import page
from partial_fc.verbs.report.run_facts import read_run
from recipes.face import main as face
from tests.waiting import at_most
from tests.world.made import class_folders, image
from tests.world.rows import Row, table
from tests.world.test_launchers import env

SIZE, CLASSES = 24, 12
ALONE = SingleWorld(), torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """model.safetensors, of random weights; photos/idNNN/N.jpg; inbox/a.jpg, of class 3, and inbox/b.jpg, of none."""
    folder = tmp_path_factory.mktemp("people")
    torch.manual_seed(0)
    facts = {"recipe": "face", "network": "tiny", "embedding_size": "16", "image_size": str(SIZE), "flip": "false"}
    checkpoint.save_tensors(models.build("tiny", 16, SIZE).state_dict(), folder / "model.safetensors", facts)
    photos = class_folders(folder / "photos", CLASSES, 3, (SIZE, SIZE))
    (folder / "inbox").mkdir()
    shutil.copy(photos / "id003/1.jpg", folder / "inbox/a.jpg")
    (folder / "inbox/b.jpg").write_bytes(image(99, 0, (SIZE, SIZE)))
    (folder / "phone").mkdir()
    shutil.copy(photos / "id003/1.jpg", folder / "phone/a.jpg")
    (folder / "phone/b.heic").write_bytes(b"\0\0\0\x18ftypheic")
    shutil.copy(photos / "id003/1.jpg", folder / "upload_17")
    (folder / "paths.txt").write_text("inbox/a.jpg\ninbox/b.jpg\n")
    (folder / "one_each").mkdir()
    for cls in range(CLASSES):
        shutil.copy(photos / f"id{cls:03d}/1.jpg", folder / f"one_each/person{cls}.jpg")
    for name, images in (("photos.npz", "photos"), ("inbox.npz", "inbox"), ("inbox.parquet", "inbox")):
        embed(EmbedOptions(model=folder / "model.safetensors", images=(folder / images,), out=folder / name), *ALONE)
    return folder


# Who is on this photo? given: gallery, probes, threshold; right: the answers.
@table(
    [
        Row("a picture", "user4 [6]", ("photos", "inbox/a.jpg", None), ["id003"]),
        Row("two pictures", "user4 [6]", ("photos", "inbox/a.jpg inbox/b.jpg", 0.99999), ["id003", "unknown"]),
        Row("a flat folder", "user4 [6]", ("photos", "inbox", 0.99999), ["id003", "unknown"]),
        Row("a flat folder of a phone, HEIC beside JPEG", "iOS", ("photos", "phone", None), ["id003"]),
        Row("a picture whose name has no ending", "an upload", ("photos", "upload_17", None), ["id003"]),
        Row("a list of paths", "find > paths.txt", ("photos", "paths.txt", 0.99999), ["id003", "unknown"]),
        Row("a table without labels", "partial-fc embed", ("photos", "inbox.npz", 0.99999), ["id003", "unknown"]),
        Row("the same as Parquet", "partial-fc embed", ("photos.npz", "inbox.parquet", 0.99999), ["id003", "unknown"]),
        Row("a picture, the gallery a table", "partial-fc embed", ("photos.npz", "inbox/a.jpg", None), ["id003"]),
        Row("one picture of each person", "user", ("one_each", "inbox", 0.99999), ["person3.jpg", "unknown"]),
        Row("the pictures of a folder among each other", "user", ("one_each", "", 1.0), ["unknown"] * CLASSES),
        Row("class folders, with a threshold", "user", ("photos", "photos/../one_class", 0.5), ["id003"] * 3),
    ]
)
def test_search_answers_for_photos_without_classes(row, home, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(home)
    if not Path("one_class").exists():
        shutil.copytree("photos/id003", "one_class/id003")
    gallery, probe, threshold = row.given
    paths = tuple(map(Path, probe.split()))
    options = SearchOptions(
        model=Path("model.safetensors"), gallery=(Path(gallery),), probe=paths, threshold=threshold, out=tmp_path
    )
    search_faces(options, *ALONE)
    printed = capsys.readouterr().out
    with open(tmp_path / "neighbours.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [one["answer"] for one in found] == row.right
    for one in found:
        assert f"{one['probe']}: {one['answer']}\n" in printed
        assert f"  {float(one['cosine1']):.4f}  {one['class1']}" in printed
        assert float(one["cosine1"]) >= float(one["cosine2"])
    if probe in ("inbox", "phone", "paths.txt") and gallery == "photos":
        assert found[0]["image1"] == "id003/1.jpg"
        assert float(found[0]["cosine1"]) == pytest.approx(1, abs=1e-5)
    assert ("1 .heic" in printed) == (probe == "phone")
    assert (tmp_path / "neighbours.png").exists() == (".npz" not in row.given[0] + row.given[1])
    assert json.loads((tmp_path / "search.json").read_text())["threshold"] == threshold


# Ties. given: classes, images of each; all embeddings are equal. right: rank 0 for each.
@table(
    [
        Row("a gallery of single images", "numbers4 F9", (18, 1), 0),
        Row("just more classes than ranks", "numbers4 F9", (6, 1), 0),
        Row("several images of each class", "numbers4 F9", (9, 4), 0),
        Row("as many classes as ranks", "numbers4 F9", (5, 3), 5),
    ]
)
def test_equal_embeddings_identify_nobody(row):
    classes, each = row.given
    gallery = np.repeat(np.eye(1, 4, dtype=np.float32), classes * each, axis=0)
    label = np.repeat(np.arange(classes), each)
    found = search(gallery[:classes], np.arange(classes), gallery, label, *ALONE, name="ties")
    assert found.rank_P.tolist() == [row.right] * classes
    assert dict(found.values())["rank5"] == float(row.right > 0)


def test_ranks_with_many_ties_are_those_of_the_definition():
    rng = np.random.default_rng(3)
    for trial in range(40):
        label_G = rng.integers(0, 12, rng.integers(5, 60))
        gallery = np.eye(4, dtype=np.float32)[rng.integers(0, 3, len(label_G))]
        probe, label_P = np.eye(4, dtype=np.float32)[rng.integers(0, 3, 9)], rng.integers(0, 12, 9)
        if not set(label_P) & set(label_G):
            continue
        found = search(probe, label_P, gallery, label_G, *ALONE, name="ties")
        for row, label, rank in zip(probe, label_P, found.rank_P, strict=True):
            cosine_G = gallery @ row
            own = cosine_G[label_G == label]
            nearer = set(label_G[cosine_G >= own.max()]) - {label} if len(own) else ()
            right = 1 + len(nearer) if len(own) else 0
            assert rank == (right if right <= 5 else 0), trial


# The terminal. given: columns of a pty; right: the most columns of a line that can be broken.
class Pty:
    def __init__(self, columns: int) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        attributes = termios.tcgetattr(theirs)
        attributes[1] &= ~termios.OPOST  # "\n" stays
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        self.stream = open(theirs, "w", encoding="utf-8")  # noqa: SIM115

    def written(self) -> str:
        self.stream.flush()
        os.set_blocking(self._ours, False)
        found = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._ours, 1 << 16):
                found += piece
        return found.decode()


SENTENCE = "one two-three four: `partial-fc train face --rec faces --resume more --models-root runs/a` and so on " * 3
WRITERS: dict[str, Callable[[Pty], None]] = {
    "a verb's line": lambda it: print(SENTENCE, file=Lines(it.stream)),
    "a line of the log": lambda it: terminal.say(SENTENCE),
    "an error": lambda it: errors.report("partial-fc", ValueError(SENTENCE)),
}


@table(
    Row(f"{writer} at {columns}", "user4 [12]", (writer, columns), limit)
    for writer in WRITERS
    for columns, limit in ((80, 80), (60, 60), (132, 132), (400, 400), (0, 80), (1, None))
)
def test_long_lines_are_broken_at_words_on_a_terminal(row, monkeypatch):
    writer, columns = row.given
    it = Pty(columns)
    monkeypatch.setattr(sys, "stdout", it.stream)
    monkeypatch.setattr(sys, "stderr", it.stream)
    WRITERS[writer](it)
    lines = it.written().rstrip("\n").split("\n")
    quoted = re.search("`[^`]*`", SENTENCE)[0]  # type: ignore[index]
    assert " ".join(" ".join(lines).split()).endswith(" ".join(SENTENCE.split()))
    assert sum(line.count(quoted) for line in lines) == 3, "what people copy stays on one line"
    if row.right is None or columns == 400:
        assert len(lines) == 1
    else:
        assert len(lines) > 1
        assert all(len(line) <= row.right or line.split("`")[0].strip() == "" for line in lines)


def test_a_pipe_gets_whole_lines(capsys):
    stream = io.StringIO()
    print(SENTENCE, file=Lines(stream))  # type: ignore[arg-type]
    errors.report("partial-fc", ValueError(SENTENCE))
    assert stream.getvalue() == SENTENCE + "\n"
    assert capsys.readouterr().err == f"partial-fc: {SENTENCE}\n"


# COLUMNS. right: the width of the boxes.
@table(
    [
        Row("1", "fault4 [10]", "1", 40),
        Row("10", "fault4 [10]", "10", 40),
        Row("39", "fault4 [10]", "39", 40),
        Row("100", "a shell that exports it", "100", 100),
        Row("a million", "fault4 [10]", "1000000", 400),
        Row("0", "cron", "0", 80),
        Row("negative", "a script", "-1", 80),
        Row("no number", "a script", "wide", 80),
        Row("empty", "a script", "", 80),
    ]
)
def test_help_ends_for_every_width(row, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", row.given)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((80, 24)))
    with at_most(20), pytest.raises(SystemExit) as ended:
        parse(SearchOptions, ["--help-all"], "partial-fc search")
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if re.search("[-─]{5}", line)) <= row.right
    assert any("--threshold" in line for line in lines)


# A word after no flag. right: the flag that is named.
@table(
    [
        Row("arcface_torch's name of one", "user4 [19]", "configs/ms1mv3_r50", "--config configs/ms1mv3_r50"),
        Row("its file", "user4 [19]", "configs/ms1mv3_r50.py", "--config configs/ms1mv3_r50.py"),
        Row("a .toml", "user", "run.toml", "--config run.toml"),
        Row("a folder of photos", "user", "photos", "--rec photos"),
        Row("a folder of photos behind a flag's value", "user", "--gpus 2 photos", "--rec photos"),
        Row("a .rec", "user", "train.rec", "--rec train.rec"),
        Row("a word that is no file", "user", "r50", ""),
    ]
)
def test_a_file_that_follows_no_flag_is_asked_about(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "photos"):
        (tmp_path / folder).mkdir()
    for file in ("configs/ms1mv3_r50.py", "run.toml", "train.rec"):
        (tmp_path / file).touch()
    with pytest.raises(UsageError, match="belongs to no flag") as refused:
        face.parse(row.given.split())
    asked = re.search(r"did you mean (--\S+ \S+)\?", str(refused.value))
    assert (asked[1] if asked else "") == row.right


# What evaluate says of small sets.
def test_a_far_that_is_too_small_names_the_command_that_measures_it(home, tmp_path, capsys, monkeypatch):
    """user4 [9]."""
    monkeypatch.chdir(home)
    files = sorted(Path("photos").glob("*/*.jpg"))
    write_pairs(Path("photos.bin"), [file.read_bytes() for file in files], [i % 2 == 0 for i in range(18)])
    monkeypatch.setattr(terminal, "_EVERY_S", 0.0)
    evaluate(EvaluateOptions(model=Path("model.safetensors"), sets=(Path("photos.bin"),), out=tmp_path), *ALONE)
    said = capsys.readouterr()
    assert "photos: 36 of 36" in said.err, "the bar counts images, of which a pair has two"
    command = re.search(r"cannot be measured[^`]*`([^`]*)`", said.out)[1]  # type: ignore[index]
    program, verb, *words = shlex.split(command)
    assert (program, verb, words[1:]) == ("partial-fc", "evaluate", ["--all-pairs", "photos"])
    evaluate(parse(EvaluateOptions, [*words, "--out", str(tmp_path)], "partial-fc evaluate"), *ALONE)
    report = json.loads((tmp_path / "evaluation.json").read_text())["all_pairs"]
    assert report["pairs"] == 3 * CLASSES * (3 * CLASSES - 1) // 2
    assert "give more images" in capsys.readouterr().out


# What is no set of pairs. right: what the message knows.
@table(
    [
        Row("a folder of photos", "user", "photos", "--all-pairs photos"),
        Row("a picture", "user", "inbox/a.jpg", "a JPEG picture"),
        Row("a zip archive", "user", "set.zip", "a zip archive"),
    ]
)
def test_what_is_no_set_of_pairs_is_named(row, home, monkeypatch):
    monkeypatch.chdir(home)
    Path("set.zip").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(ValueError, match=r"expected a \.bin") as refused:
        EvaluateOptions(model=Path("model.safetensors"), sets=(Path(row.given),))
    assert row.right in str(refused.value)


# A network that gives no embedding. right: what the message knows of its weights.
@table(
    [
        Row("a weight is NaN", "a diverged training", torch.nan, "fc.bias has NaN or Inf"),
        Row("all weights are 0", "never trained", 0.0, "weights are finite"),
    ]
)
def test_why_a_network_gives_no_embedding(row, home):
    from partial_fc.embedding.load import load

    model = load(home / "model.safetensors")
    for name, weight in model.network.named_parameters():
        if row.given == 0 or name == "fc.bias":
            weight.data.fill_(row.given)
    with pytest.raises(ValueError, match="image 0") as refused:
        model.embed(home / "inbox/a.jpg")
    assert row.right in str(refused.value)


# The run's own lines.
def test_the_bar_shows_the_loss_of_the_line_above_it(tmp_path, monkeypatch):
    """user4 [20]: `step 10 · loss 14.6` stood above `loss=25.5`."""
    drawn = io.StringIO()
    monkeypatch.setattr(terminal, "is_watched", lambda: True)
    bar = lambda **given: tqdm(file=drawn, ncols=80, total=given["total"], mininterval=0, miniters=1)  # noqa: E731
    monkeypatch.setattr(terminal, "bar", bar)
    it = progress_module.Progress(tmp_path, SingleWorld(), StepLine(1, 3, 8), 0, 0)
    for step, loss in enumerate((25.5, 14.6, 3.25), start=1):
        it.advance(loss)
        it.report(step, 8 * step, 0.1, loss, 0.1, {})
        assert f"loss={loss}" in drawn.getvalue().split("\r")[-1]
    it.close()


def test_a_folder_that_nobody_typed_is_not_other_than_by_default(home, tmp_path, monkeypatch):
    """user4 [22]."""
    monkeypatch.chdir(tmp_path)
    for typed in ([], ["--models-root", "runs/mine"]):
        config, _ = face.parse(["--rec", str(home / "photos"), "--network", "tiny", *typed])
        run_recipe("face", config, (), lambda run: 0, called=(home / "photos", "tiny"))
        root = tmp_path / (typed[1] if typed else "runs/face-photos-tiny")
        written = json.loads((root / "configuration.json").read_text())
        assert written["configuration"]["models_root"] == str(root.relative_to(tmp_path))
        assert written["differs"].get("models_root") == (typed[1] if typed else None)
        assert ("--models-root" in (root / "logs/rank-0000.log").read_text()) == bool(typed)


@table(
    [
        Row("a refusal of all ranks, rank 0", "user4 [22]", (errors.RefusedByAll, "0"), True),
        Row("a refusal of all ranks, rank 1", "user4 [22]", (errors.RefusedByAll, "1"), False),
        Row("an error of rank 1 alone", "user4 [22]", (ValueError, "1"), True),
    ]
)
def test_a_refusal_of_all_ranks_is_printed_once(row, tmp_path, monkeypatch, capsys):
    kind, rank = row.given
    launched = env(f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1")
    for name, value in (launched | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "why")}).items():
        monkeypatch.setenv(name, value)

    def main(arguments: list[str]) -> int:
        raise kind("this run is finished")

    monkeypatch.setattr(train, "_recipe", lambda name: SimpleNamespace(main=main))
    assert train.main(["face"]) == 1
    assert ("this run is finished" in capsys.readouterr().err) == row.right
    assert "this run is finished" in (tmp_path / "why").read_text(), "for torchrun's summary"


def test_a_full_disk_costs_the_log_one_line(tmp_path, capsys):
    """fault4 [10]: a trace of 20 to 90 lines for each line of the log."""
    (tmp_path / "rank-0000.log").symlink_to("/dev/full")
    logger = logging.Logger("test of a full disk")
    logger.addHandler(handler := LogFile(tmp_path / "rank-0000.log"))
    for number in range(5):
        logger.info("line %d", number)
    with contextlib.suppress(OSError):
        handler.close()
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    assert "rank-0000.log" in out
    assert "No space left" in out


# The report, and pictures.
def test_a_report_has_the_pictures_of_a_search(home, tmp_path):
    """user4 [25]."""
    (tmp_path / "configuration.json").write_text(json.dumps({"recipe": "face", "configuration": {"rec": "x"}}))
    options = SearchOptions(model=home / "model.safetensors", gallery=(home / "photos",), out=tmp_path / "search")
    search_faces(options, *ALONE)
    html = page(read_run(tmp_path))
    assert html.count("data:image/png") == 1
    assert "(search)" in html
    commands = re.search(r"pre \{[^}]*\}", html)[0]  # type: ignore[index]
    assert "pre-wrap" in commands, "a long command is not cut at the edge"


@table(Row(f"{side} pixels", "user4 [25]", side, pictures.SIDE) for side in (16, 28, 40, 64, 100, 112, 224, 1000))
def test_a_picture_fills_its_tile(row):
    white = np.full((row.given, row.given, 3), 255, np.uint8)
    assert (pictures.fit(white) == 255).all()
    tall = pictures.fit(white[:, : max(1, row.given // 2)])
    assert (tall[:, row.right // 2] == 255).all(), "as high as the tile"
    assert (tall[:, 0] != 255).all()
