"""What cannot be printed delays and ends nobody."""

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
# Talks for a second, or much at once; "saved" stands for its last checkpoint.
CHILD = """
import os, signal, sys, time
def stop(number, frame):
    with open(f"saved-{os.getpid()}", "w") as file:
        file.write(str(number))
    os._exit(75 if number != signal.SIGINT else 130)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, stop)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
open(f"started-{os.getpid()}", "w").close()
for i in range(int(sys.argv[1])):
    print("x" * int(sys.argv[2]), i, flush=True)
    time.sleep(float(sys.argv[3]))
open(f"done-{os.getpid()}", "w").close()
"""
# Who does not read is waited for more briefly at the end.
BRIEF = "from partial_fc import output; output.drain.__defaults__ = (0.2,)"
LAUNCHER = f"""
import sys
{BRIEF}
from partial_fc import supervisor
from partial_fc.supervisor import Command
child = [sys.executable, "child.py", *sys.argv[1:]]
sys.exit(supervisor.run([Command(name=f"rank {{number}}", words=child) for number in (0, 1)]))
"""
# The launchers of ours, each with two children.
LAUNCHERS = {
    "--gpus": ["launcher.py"],
    "partial-fc launch": [
        *("-c", f"{BRIEF}; from partial_fc.cli import main; main()"),
        *shlex.split("launch -s 0 -n 2 --launcher local"),
    ],
}


@pytest.fixture(params=LAUNCHERS)
def command(request, tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = [sys.executable, *LAUNCHERS[request.param]]
    if "launch" in before:
        before += [sys.executable, "child.py"]
    return lambda *words: [*before, *map(str, words)]


def both(word: str) -> list[Path]:
    """The files of this name that the two children have written."""
    until(lambda: len(list(Path().glob(f"{word}-*"))) == 2)
    return list(Path().glob(f"{word}-*"))


def saved() -> set[str]:
    """The signals that the children have ended with."""
    return {path.read_text() for path in both("saved")}


def test_a_full_disk_under_the_log_ends_nobody(command):
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command(10, 5, 0.01), stdout=full, stderr=full).returncode == 0
    both("done")


def test_a_reader_that_is_gone_ends_nobody(command):
    job = subprocess.Popen(command(50, 5, 0.02), stdout=subprocess.PIPE)
    assert job.stdout is not None
    assert job.stdout.readline().endswith(b"xxxxx 0\n")
    job.stdout.close()
    assert job.wait(60) == 0
    both("done")


def test_a_signal_is_heard_while_the_reader_stalls(command):
    job = subprocess.Popen(command(10**9, 4000, 0), stdout=subprocess.PIPE)
    both("started")
    time.sleep(1)  # the pipe and the queue are full
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 75
    assert saved() == {str(signal.SIGTERM.value)}
    assert job.stdout is not None
    job.stdout.close()


def test_a_terminal_that_is_closed_is_a_signal_and_no_error(command):
    terminal, side = pty.openpty()
    job = subprocess.Popen(
        command(10**9, 5, 0.01), stdin=side, stdout=side, stderr=side, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(side)
    both("started")
    os.close(terminal)
    assert job.wait(60) == 75
    assert saved() == {str(signal.SIGHUP.value)}


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_descriptor_is_nobody_elses(closed, tmp_path):
    """What is opened next is not what print writes to."""
    program = """
import sys
from partial_fc import output
output.detach()
with open(sys.argv[1], "w") as file:
    print("out")
    print("error", file=sys.stderr)
    output.drain()
    sys.exit(file.fileno() < 3)
"""
    words = shlex.join([sys.executable, "-c", program, str(tmp_path / "file")])
    done = subprocess.run(["bash", "-c", f"{words} {closed}"], capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "file").read_text()
    assert done.stdout == (b"" if ">&-" in closed.replace("2>&-", "") else b"out\n")


# What a signal ends has its default action for it; the others go on, as a connection that breaks must not end them.
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--help", -signal.SIGPIPE),
        pytest.param("data pack --help", -signal.SIGPIPE, marks=pytest.mark.long),
        ("train face --help-all", 0),
        ("launch --help", 0),
        pytest.param("doctor env --help", 0, marks=pytest.mark.long),
        pytest.param("evaluate --help", 0, marks=pytest.mark.long),
        ("run.sh --help", 0),  # which starts no mpirun: that would not end quietly
    ],
)
def test_help_ends_quietly_where_nobody_reads_on(words, status):
    """As for `partial-fc train --help | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = ["bash"] if words.startswith("run.sh") else [sys.executable, "-m", "partial_fc"]
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([*command, *words.split()], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, env=environ)
    os.close(write)
    assert (done.returncode, done.stderr) == (status, b"")
