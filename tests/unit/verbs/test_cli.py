"""The command line `partial-fc`: its verbs, what it says of words that are none, and what starting it costs."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
from safetensors import SafetensorError

from partial_fc import cli
from partial_fc.flags.command_line import parse
from partial_fc.verbs import train as train_command
from partial_fc.verbs.data.pack import IndexOptions
from recipes.face import main as face

ROOT = Path(__file__).parents[3]


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command line: (exit status, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["partial-fc", *words])
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code or 0
        return status, *capsys.readouterr()

    before = signal.getsignal(signal.SIGPIPE)
    yield run
    signal.signal(signal.SIGPIPE, before)


@pytest.mark.parametrize(
    ("words", "meant"),
    [("packk", "data pack"), ("doctro", "doctor"), ("checkpoint classes ad", "checkpoint classes add"), ("qqqqqq", "")],
)
def test_a_word_that_is_no_verb_costs_two_lines(command, words, meant):
    """What is wrong, and where the list is: the list itself would push the first line off the screen."""
    status, printed, said = command(*words.split())
    wrong, where = said.splitlines()
    assert (status, printed) == (2, "")
    assert wrong.startswith(f"partial-fc: there is no command {words!r}")
    assert (f"did you mean `partial-fc {meant}`?" in wrong) == bool(meant)
    status, printed, _ = command(*where.partition("`partial-fc ")[2].partition("`")[0].split())
    assert status == 0
    assert "COMMAND" in printed


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_list_of_verbs_says_what_this_is_and_fits_a_terminal(command, words):
    status, printed, _ = command(*words)
    assert status == 0
    assert printed.startswith("partial-fc trains models")
    assert all(re.search(rf"(?m)^  {name}  ", printed) for name in cli.VERBS if "classes" not in name)
    assert max(map(len, printed.splitlines())) <= 80
    assert len(printed.splitlines()) <= 60


@pytest.mark.parametrize("section", cli.SECTIONS)
def test_the_example_of_a_section_is_a_command_line_that_is_taken(section, tmp_path, monkeypatch):
    _, example, verbs = cli.SECTIONS[section]
    program, *words = example.split()
    name, rest = cli.find(words)
    assert program == "partial-fc"
    assert name in verbs
    if name == "train":
        face.parse(rest[1:])
        return
    (tmp_path / "pairs.bin").touch()
    monkeypatch.chdir(tmp_path)
    parse(get_type_hints(cli.load(name))["options"], rest, example)


def test_help_and_mistakes_of_every_verb_and_recipe_come_without_torch():
    """As in the processes of a launch whose command line is wrong."""
    code = r"""
import contextlib, io, re, sys
from partial_fc import cli
from partial_fc.verbs import train

for name in (name for name in cli.VERBS if name not in cli._OWN_READERS):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        with contextlib.suppress(SystemExit):
            cli.run(name, ["--help-all"])
        assert cli.run(name, ["--no-such-flag"]) == 2, name
    assert f"usage: partial-fc {name}" in said.getvalue(), name
    assert not re.search(r"\bNone\b|--flip PATH|\(default: \)", said.getvalue()), name
    assert f"partial-fc {name}: " in said.getvalue(), name
    assert "torch" not in sys.modules, name
for words in ("face --help", "face --lrr 3", "mnist --epochs 0", "imagenet --help", "kinetics --model x"):
    with contextlib.suppress(SystemExit):
        train.main(words.split())
assert "torch" not in sys.modules, "a recipe"
for name in sys.argv[1:]:
    cli.load(name)
assert "torch" not in sys.modules, "what reads or writes data alone"
"""
    data = [verb for verb in cli.VERBS if verb.startswith(("data ", "doctor "))]
    assert len(data) == 9
    done = subprocess.run([sys.executable, "-c", code, *data], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_error_of_the_system_is_told_with_what_to_do(command, monkeypatch):
    def full(options: IndexOptions) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/train.idx")

    monkeypatch.setattr("partial_fc.verbs.data.pack.make_index", full)
    status, _, said = command("data", "index", "train.rec")
    assert status == 1
    assert said.startswith("partial-fc data index: No space left on device: /data/train.idx; `df -h`")
    monkeypatch.setenv("PARTIAL_FC_TRACE", "1")
    with pytest.raises(OSError, match="No space left"):
        command("data", "index", "train.rec")


# ---- train


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        '"""A task of mine.\n\nMore."""\n'
        "import signal\n"
        "def main(flags):\n"
        "    print(flags, signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN)\n"
        "    return len(flags)\n"
    )
    return path


def test_a_recipe_may_be_a_file_of_the_users(recipe):
    """Started as a launcher would; a connection that breaks must not end it without a word."""
    words = [sys.executable, "-m", "partial_fc", "train", str(recipe), "--a", "--b"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "['--a', '--b'] True\n"), done.stderr


# How it ends when something fails: one line for the user. (What the other ranks read: test_hang_report.py.)


@pytest.fixture
def failing(monkeypatch, capsys):
    """Runs train.py with a recipe that raises: (exit status, stderr)."""
    monkeypatch.delenv("PARTIAL_FC_TRACE", raising=False)

    def run(error: BaseException) -> tuple[int, str]:
        def main(_: list[str]) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "recipes.face.main", SimpleNamespace(main=main))
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
