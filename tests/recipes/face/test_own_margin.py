"""--loss FILE.py:CLASS, with the margin of docs/head.md."""

import pytest

import partial_fc
from partial_fc.comm import SingleWorld
from partial_fc.verbs.model.evaluate import EvaluateOptions, evaluate
from tests.house.test_library import programs
from tests.running import losses, train_several


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_it_is_the_same_margin_of_the_library_and_resumes(glyphs, tmp_path, size):
    file = tmp_path / "margin.py"
    file.write_text(programs("head.md")[-1])
    common = f"--dataset glyphs --rec {glyphs} --val-targets --check-data off --batch-size 8 --image-size 24 "
    common += "--lr-scheduler constant --warmup-steps 0 --max-steps"

    def train(name, flags):
        printed = train_several({tmp_path / name: f"{common} {flags}"}, size)
        return printed, losses(tmp_path / name)

    own = f"--margins None --loss {file}:Weaker"
    _, expected = train("library", "4 --loss combined --margins 1 0 0.2")
    train("own", f"2 {own}")
    file.write_text(file.read_text() + "\n# the same in other words\n")
    printed, found = train("own", f"4 {own}")
    assert found == expected
    assert f"{file} has changed since it was copied" in printed
    copy = tmp_path / "own/margin.py"
    assert copy.read_text() == file.read_text()
    # Whoever only uses the model does not run it.
    for each in (copy, file):
        each.write_text("raise SystemExit")
    assert partial_fc.load(tmp_path / "own").embedding_size == 32
    evaluate(
        EvaluateOptions(model=tmp_path / "own", sets=(glyphs / "unseen.bin",), out=tmp_path / "out"),
        SingleWorld(),
        "cpu",
    )
