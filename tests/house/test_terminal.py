"""Progress bars and lines above them, on a terminal of so many columns, alone and under our launcher; in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from partial_fc import terminal

PACKAGE = Path(__file__).parents[2] / "partial_fc"
WORK = """
import os, time
import sys
from partial_fc import terminal
from partial_fc.printable import Lines
sys.stdout = Lines(sys.stdout)  # as verbs have it
rank = int(os.environ.get("RANK", 0))
with terminal.bar(total=4, desc="train", shown=rank == 0, mininterval=0) as bar:
    for step in range(4):
        bar.update()
        if rank == 0:
            terminal.say(f"step {step}")
            for _ in terminal.bar(range(3), desc="evaluation", leave=False, mininterval=0):
                pass
    if rank == 1:
        time.sleep(0.3)
        terminal.say("warning")
"""
UNDER_LAUNCHER = f"""
import os, sys
from partial_fc.comm.launch import spawn
words = [sys.executable, "-c", {WORK!r}]
sys.exit(spawn.run(words, gpus=2))
"""


def on_terminal(program: str, columns: int) -> str:
    """All that is written to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # Linux's way to say that nobody has it open any more
                break
            written += piece
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode()


def screen(written: str, columns: int) -> list[str]:
    """What is to be seen at the end, as far as our bars need it: carriage return, end of line, up, erase."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[A-Z]|[^\x1b]", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        elif part == "\x1b[A":
            row -= 1
        else:
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
            column += 1
            assert column <= columns, rows[row]
    return [text.rstrip() for text in rows]


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("launched", [False, True])
def test_a_bar_moves_and_lines_stand_whole_above_it(launched, columns):
    written = on_terminal(UNDER_LAUNCHER if launched else WORK, columns)
    rows = screen(written, columns)
    assert [row for row in rows if row.startswith("step")] == [f"step {n}" for n in range(4)]
    assert [row for row in rows if "train" in row] == [row for row in rows if row.startswith("train: 100%|")]
    assert any(row.startswith("train: 100%|") for row in rows)
    assert not any("evaluation" in row for row in rows)
    assert "evaluation:  67%|" in written
    if launched:
        assert "warning" in rows  # of rank 1, and nothing of the bar behind it


@pytest.mark.parametrize("launched", [False, True])
def test_a_pipe_gets_lines(launched):
    often = "from partial_fc import terminal\nterminal._EVERY_S = 0\n"
    program = UNDER_LAUNCHER.replace("import os, time", "import os, time\\n" + often.replace("\n", "\\n"))
    words = [sys.executable, "-c", program if launched else often + WORK]
    printed = subprocess.run(words, capture_output=True, check=True)
    assert not set(b"\r\x1b") & set(printed.stdout + printed.stderr)
    assert re.search(rb"^train: 2 of 4, \S+ left$", printed.stderr, re.MULTILINE)
    steps = [line for line in printed.stdout.decode().splitlines() if line.startswith("step")]
    assert steps == [f"step {n}" for n in range(4)]


def test_what_a_launcher_tells_holds_only_where_it_passes_lines_on(tmp_path, monkeypatch):
    """Not where a command of its own redirects them into a file."""
    code = "import sys; from partial_fc import terminal; print(terminal.is_watched(), file=open(sys.argv[1], 'w'))"
    told = {**os.environ, terminal.WIDTH: "80"}
    for stdout, watched in ((subprocess.PIPE, "True"), ((tmp_path / "log").open("w"), "False")):
        words = [sys.executable, "-c", code, str(tmp_path / "said")]
        subprocess.run(words, env=told, stdout=stdout, stderr=subprocess.PIPE, check=True)
        assert (tmp_path / "said").read_text() == f"{watched}\n"


def test_only_one_house_draws_bars():
    by_hand = [path.name for path in PACKAGE.rglob("*.py") if re.search(r"\btqdm(\(|\.write)", path.read_text())]
    assert by_hand == ["terminal.py"]
