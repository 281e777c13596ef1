"""Recipe `face` with a head for each of several sets, named on the command line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from partial_fc import data as sources
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.data.sets.weighted import Shares
from partial_fc.verbs.checkpoint.classes import ListOptions, list_classes
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from partial_fc.verbs.model.classify import ClassifyOptions, classify
from tests.running import endings, face, killed, losses, train_here, train_several
from tests.running import several as run_several

COMMON = (
    "--val-targets --check-data off --image-size 24 --lr-scheduler constant --sync-bn --warmup-steps 1 "
    "--precision fp64 --sample-rate 0.5 words=1 --loss cosface words=softmax --margins None --head-weight words=0.5 "
    "--head-lr words=0.001"
)


@pytest.fixture(scope="module")
def sets(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """--rec: the classes of the demo's small set, and half of their images, of ten classes, as another set."""
    folder = tmp_path_factory.mktemp("sets")
    source = sources.open_source(glyphs)
    for name, step, num_classes in (("image", 1, 80), ("words", 2, 10)):
        with RecordWriter(folder / f"{name}.rec") as writer:
            for index in range(0, len(source), step):
                sample = source.read(index)
                writer.write(index, pack(sample.label % num_classes, sample.data))
    return f"--rec image={folder}/image.rec words={folder}/words.rec"


def test_two_processes_killed_and_three_give_the_curve_of_two(sets, tmp_path):
    two, three = (f"{sets} {COMMON} --batch-size image={n} words={n}" for n in (6, 4))
    train_several({tmp_path / "whole": f"{two} --max-steps 5"})
    given = face(tmp_path / "parts", f"{two} --max-steps 5 --checkpoint-every 1", "stall@5")
    killed(given, 2, tmp_path / "parts/checkpoints/step-00000003/COMPLETE", tmp_path / "output")
    printed = train_several({tmp_path / "parts": f"{three} --max-steps 5"}, 3)
    assert "resumed from" in printed
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    log = (tmp_path / "parts/logs/rank-0000.log").read_text()
    assert "head image: this rank has the centres of 27 of 80 classes, 0 to 26" in log
    assert "head words: this rank has the centres of 4 of 10 classes, 0 to 3" in log
    written = json.loads((tmp_path / "parts/configuration.json").read_text())
    assert "words.sample_rate=1" in json.dumps(written)
    assert verify(VerifyOptions((tmp_path / "parts",))) == 0


def test_each_head_has_its_flags(sets, tmp_path):
    """A head whose weight is 0 does not move the backbone. What is to be said of both is said once."""
    given = f"{sets} {COMMON} --batch-size image=4 words=4 --max-steps 2 --loss words=arcface --sample-rate 0.5 "
    given += "--head-catch-up none"
    assert train_here(tmp_path / "a", given).count("note: --head-catch-up none: momentum") == 1
    train_here(tmp_path / "b", f"{sets} {COMMON} --batch-size image=4 words=4 --max-steps 2 --head-weight words=0")
    assert losses(tmp_path / "a") != losses(tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "a/checkpoints/step-00000002").glob("head-*"))
    assert {name.split("-")[1] for name in files} == {"image", "words"}


@pytest.mark.long
def test_each_set_has_its_own_labels(glyphs, sets, tmp_path):
    """A set's records are checked by its own number, its head sees no other's, and a wrong one has a name."""
    source = sources.open_source(glyphs)
    with RecordWriter(tmp_path / "words.rec") as writer:
        for index in range(0, len(source), 2):
            sample = source.read(index)
            writer.write(index, pack([sample.label % 10, 10 + sample.label % 7, 3.0], sample.data))
    named = f"{sets.rpartition('words=')[0]}words={tmp_path}/words.rec {COMMON} --batch-size image=4 words=4"
    several = f"{named} --labels words=3 --rule words=own-out --labels-drawn words=2 --max-steps 3"
    train_here(tmp_path / "one", several)
    train_several({tmp_path / "two": several.replace("image=4 words=4", "image=2 words=2")})
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    (tmp_path / "property").write_text("17,24,24\n")  # else all records are read to count the classes
    bad = several.replace("--labels words=3", "--labels image=5 words=2")
    given = [face(tmp_path / check, f"{bad} --check-data {check}") for check in ("quick", "off")]
    printed = run_several(given, 2)
    for rank in range(2):
        for ending in endings(printed, rank):
            assert re.search(r"rank \d: set words: .*words\.rec, key \d+: 3 labels; expected 1 to 2", ending), ending


def test_each_head_has_its_start_centres_and_micro_batches_have_its_share(sets, tmp_path):
    row_CD = np.random.default_rng(0).normal(size=(10, 32))
    np.save(tmp_path / "words.npy", row_CD)
    common = f"{sets} {COMMON} --batch-size image=4 words=4 --accumulate 2 --max-steps 2"
    start = f"--start-centres image=imprint words={tmp_path}/words.npy"
    log = train_here(tmp_path / "a", f"{common} {start}")
    assert "the centres of 80 classes are means of" in log
    assert f"class centres of words from {tmp_path}/words.npy" in log
    (file,) = (tmp_path / "a/checkpoints/step-00000002").glob("head-words-*")
    centre_CD = load_file(file)["centres"].double()
    assert torch.nn.functional.cosine_similarity(centre_CD, torch.from_numpy(row_CD)).min() > 0.99
    assert "class centres from" in train_here(tmp_path / "b", f"{common} --start-centres {tmp_path}/a")
    assert losses(tmp_path / "b") != losses(tmp_path / "a")
    with pytest.raises(ValueError, match="a checkpoint has the centres of all heads"):
        train_here(tmp_path / "d", f"{common} --start-centres words={tmp_path}/a")
    np.save(tmp_path / "words.npy", row_CD[:9])
    with pytest.raises(ValueError, match=r"--start-centres words=.*words\.npy.*\(9, 32\)"):
        train_here(tmp_path / "e", f"{common} {start}")


def test_weights_of_samples_are_of_the_sets_one_after_the_other(sets, tmp_path):
    """Where all of `words` weigh nothing, the loss is that of a head whose weight is 0."""
    count_S = [len(sources.open_source(Path(rec.split("=")[1]))) for rec in sets.split()[1:]]
    np.save(tmp_path / "w.npy", np.repeat([1.0, 0.0], count_S))
    common = f"{sets} {COMMON} --batch-size image=4 words=4 --max-steps 3"
    train_here(tmp_path / "rows", f"{common} --sample-weights {tmp_path}/w.npy")
    train_here(tmp_path / "head", f"{common} --head-weight words=0")
    assert losses(tmp_path / "rows") == pytest.approx(losses(tmp_path / "head"), rel=1e-12)
    np.save(tmp_path / "w.npy", np.ones(sum(count_S) - 1))
    with pytest.raises(ValueError, match=r"w\.npy.*one for each record"):
        train_here(tmp_path / "few", f"{common} --sample-weights {tmp_path}/w.npy")


def test_a_table_of_several_is_named(sets, glyphs, tmp_path, capsys):
    """classify takes one by its name, and says which there are."""
    train_here(tmp_path / "run", f"{sets} {COMMON} --batch-size image=4 words=4 --max-steps 2")
    run, images = tmp_path / "run", glyphs / "train.rec"
    capsys.readouterr()
    assert classify(ClassifyOptions(checkpoint=run, images=(images,), table="words", top=20)) == 0
    printed = capsys.readouterr().out
    assert "10 classes" in printed
    assert {int(number) for number in re.findall(r"class (\d+)", printed)} == set(range(10))
    for act, said in [
        (lambda: classify(ClassifyOptions(checkpoint=run, images=(images,))), r"'image', 'words'; say which: --table"),
        (lambda: classify(ClassifyOptions(checkpoint=run, images=(images,), table="a")), "none is named 'a'"),
        (lambda: list_classes(ListOptions(run)), "the tables 'image', 'words'; expected .* one table"),
    ]:
        with pytest.raises(ValueError, match=said):
            act()


@pytest.mark.parametrize("shares", [[1, 1], [6, 4], [1, 3]])
def test_every_batch_has_its_share_of_each_set_in_the_order_of_any_number_of_ranks(shares):
    order = Shares([("a", 10, 1.0), ("b", 7, 1.0)], shares, seed=3)
    batch = sum(shares)
    alone = [order.select(start, 3 * batch, 0, 1).index_B for start in range(0, 12 * batch, 3 * batch)]
    for number, start in enumerate(range(0, 12 * batch, 3 * batch)):
        parts = [order.select(start, batch, rank, 3).index_B for rank in range(3)]
        assert torch.equal(torch.cat(parts), alone[number])
        assert all(int((part < 10).sum()) == shares[0] for part in parts)
    drawn = torch.cat([order.select(start, batch, 0, 1).index_B for start in range(0, 10 * batch, batch)])
    first = drawn[drawn < 10]
    assert all(sorted(turn.tolist()) == list(range(10)) for turn in first[: len(first) // 10 * 10].view(-1, 10))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--sample-rate faces=0.1", "there is no faces; the heads are image, words"),
        ("--batch-size image=4", "names image, and not words"),
        ("--labels words=0", "head words: --labels is 0"),
        ("--labels image=2 words=9 --labels-drawn 3", "head image: --labels-drawn 3 with --labels 2"),
        ("--batch-size image=4 words=x", "words=x; expected 1 or more"),
        ("--heads faces.loss=arcface", "NAME.flag=value with a NAME of image, words"),
        ("--sample-rate words=2", "head words: --sample-rate is 2"),
        ("--accumulate 2", "give the number of each set's"),
        ("--balance class", "--balance class with sets that have heads of their own"),
        ("--heads image.batch_size=4", "names image, and not words"),
        ("--head-clip words=2", "for all heads together"),
        ("--rec a=A B", "name two sets or more, and each"),
        ("--rec a=A a=B", "twice"),
        ("--rec A B --heads b.loss=arcface", "--rec names no sets"),
        ("--num-classes 5", "--num-classes with sets that have heads of their own"),
    ],
)
def test_what_cannot_be_is_named_before_the_run(sets, tmp_path, flags, said):
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        train_here(tmp_path, f"{sets} {flags}")
