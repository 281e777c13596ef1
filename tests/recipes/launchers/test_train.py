"""How train.py ends when something fails: one line for the user. (What the other ranks read: test_hang_report.py.)"""

import sys
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from partial_fc.verbs import train as train_command


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


def test_a_fault_of_the_program_keeps_its_trace(failing):
    with pytest.raises(KeyError):
        failing(KeyError("thing"))
