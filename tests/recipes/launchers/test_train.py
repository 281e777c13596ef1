"""How train.py ends when something fails: one line for the user, and the reason for the other ranks."""

import errno
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from partial_fc.verbs import train as train_command
from tests.recipes.conftest import SMALL
from tests.recipes.hang import free_port
from tests.recipes.launch import start
from tests.recipes.several import become_rank

SYNTHETIC = "--dataset synthetic --num-classes 20 --num-images 64 --image-size 24 --batch-size 4 --max-steps 4000"


def train(words: list[str]) -> None:
    train_command.exit_now(train_command.main(["face", *words], "train.py"))


def test_the_others_read_why_a_rank_failed(tmp_path):
    """(Rank 0, whose end is also that of the status server: test_hang_report.py.)"""
    damaged = tmp_path / "damaged.pt"
    damaged.write_text("no tensors")
    common, port = ["--models-root", str(tmp_path), *SMALL, *shlex.split(SYNTHETIC)], free_port()
    # A launcher would end the other before it can say anything.
    ranks = [
        start(become_rank, rank, 2, port, str(tmp_path / f"output.{rank}"), train, [*common, *own])
        for rank, own in enumerate(([], ["--pretrained", str(damaged)]))
    ]
    for rank in ranks:
        rank.join(170)
        rank.kill()
    good, bad = ((tmp_path / f"output.{rank}").read_text() for rank in (0, 1))
    assert [rank.exitcode for rank in ranks] == [1, 1], good + bad
    words = re.search(r"train.py face: (.*damaged\.pt.*)", bad)
    assert words, bad
    assert "missing: rank 1" in good
    assert f"(it failed; ValueError: {' '.join(words[1].split())})" in good


@pytest.fixture
def failing(monkeypatch, capsys):
    """Runs train.py with a recipe that raises: (exit status, stderr)."""
    monkeypatch.delenv("PARTIAL_FC_TRACE", raising=False)

    def run(error: BaseException) -> tuple[int, str]:
        def main(_: list[str]) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "recipes.face", SimpleNamespace(main=main))
        return train_command.main(["face"], "train.py"), capsys.readouterr().err

    return run


def test_errors_with_words_of_their_own_are_told_as_they_are(failing):
    for error in (
        ValueError("key 17"),
        FloatingPointError("the loss is nan at step 3"),
        ConnectionError("rank 3 did not come"),
        SafetensorError("I/O error: No space left on device"),
    ):
        assert failing(error) == (1, f"train.py face: {error}\n")
    assert failing(KeyboardInterrupt()) == (130, "train.py face: interrupted\n")


def test_the_trace_is_there_when_asked_for(failing, monkeypatch):
    monkeypatch.setenv("PARTIAL_FC_TRACE", "1")
    with pytest.raises(FileNotFoundError):
        failing(FileNotFoundError(errno.ENOENT, "No such file or directory", "/data"))


def test_a_fault_of_the_program_keeps_its_trace(failing):
    with pytest.raises(KeyError):
        failing(KeyError("thing"))


def test_a_models_root_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "run"
    assert train_command.main(["face", "--models-root", str(root), *SMALL, *SYNTHETIC.split()]) == 1
    assert f"rank 0 cannot write to {root}: Not a directory" in capsys.readouterr().err
