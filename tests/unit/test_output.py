"""What cannot be printed delays and ends nobody."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Talks for a second, or much at once; "saved" stands for its last checkpoint.
CHILD = """
import os, signal, sys, time
def stop(number, frame):
    open("saved", "w").write(str(number))
    os._exit(75 if number != signal.SIGINT else 130)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, stop)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
open("started", "w").close()
for i in range(int(sys.argv[1])):
    print("x" * int(sys.argv[2]), i, flush=True)
    time.sleep(float(sys.argv[3]))
open("done", "w").close()
"""
LAUNCHER = """
import sys
from partial_fc import supervisor
from partial_fc.supervisor import Command
sys.exit(supervisor.run([Command(name="rank 0", words=[sys.executable, "child.py", *sys.argv[1:]])]))
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda *words: [sys.executable, "launcher.py", *map(str, words)]


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.02)


def test_a_full_disk_under_the_log_ends_nobody(command):
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command(10, 5, 0.01), stdout=full, stderr=full).returncode == 0
    assert Path("done").exists()


def test_a_reader_that_is_gone_ends_nobody(command):
    job = subprocess.Popen(command(50, 5, 0.02), stdout=subprocess.PIPE)
    assert job.stdout is not None
    assert job.stdout.readline() == b"xxxxx 0\n"
    job.stdout.close()
    assert job.wait(60) == 0
    assert Path("done").exists()


def test_a_signal_is_heard_while_the_reader_stalls(command):
    job = subprocess.Popen(command(10**9, 4000, 0), stdout=subprocess.PIPE)
    wait_for("started")
    time.sleep(1)  # the pipe and the queue are full
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 75
    assert Path("saved").read_text() == str(signal.SIGTERM.value)
    assert job.stdout is not None
    job.stdout.close()


def test_a_terminal_that_is_closed_is_a_signal_and_no_error(command):
    terminal, side = pty.openpty()
    job = subprocess.Popen(
        command(10**9, 5, 0.01), stdin=side, stdout=side, stderr=side, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(side)
    wait_for("started")
    os.close(terminal)
    assert job.wait(60) == 75
    assert Path("saved").read_text() == str(signal.SIGHUP.value)


def test_ctrl_c_with_tee(command):
    line = " ".join(command(10**9, 5, 0.01))
    job = subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {line} 2>&1 | tee log"], start_new_session=True, stdout=subprocess.DEVNULL
    )
    wait_for("started")
    os.killpg(job.pid, signal.SIGINT)
    job.wait(60)
    wait_for("saved")
    assert Path("saved").read_text() == str(signal.SIGINT.value)
