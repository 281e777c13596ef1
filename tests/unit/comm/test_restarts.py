"""The supervisor (`--restarts`) starts the processes of a host again where one fails, and nothing else. (One of a
training: tests/faults/test_torture.py.)"""

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partial_fc.comm.launch import restarts as restarting
from partial_fc.comm.launch.restarts import MAX_WITHOUT_PROGRESS, Restarts

# Rank 0 of start number n does line n of the plan: STEP that it comes to, then how it ends: a status, "kill" or "wait".
# Other ranks wait.
JOB = """
import os, signal, sys, time
from partial_fc.comm.launch import restarts, spawn, start
from partial_fc.flags import LaunchFlags
status = start.start(LaunchFlags(gpus=int(sys.argv[3]), restarts=int(sys.argv[2])))
if status is not None:
    sys.exit(status)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda number, _: os._exit(75 if number == signal.SIGTERM else 200 + number))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if os.environ.get("RANK", "0") == "0":
    with open(sys.argv[1] + "/workers", "a") as file:
        file.write(f"{os.getpid()} {restarts.furthest_step()}\\n")
    number = len(open(sys.argv[1] + "/workers").readlines())
    step, end = open(sys.argv[1] + "/plan").read().splitlines()[number - 1].split()
    restarts.step_done(int(step))
else:
    end = "wait"
if end == "wait":
    time.sleep(60)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(int(end))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a supervisor whose processes follow the plan."""
    started = []

    def start(plan: str, restarts: int = 99, gpus: int = 1) -> subprocess.Popen:
        (tmp_path / "plan").write_text(plan)
        words = [sys.executable, "-c", JOB, str(tmp_path), str(restarts), str(gpus)]
        started.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def workers(tmp_path: Path, wanted: int = 0) -> list[list[int]]:
    """[process, furthest step when it began] of each; once there are as many as wanted."""
    path = tmp_path / "workers"
    while wanted and not (path.exists() and path.read_text().count("\n") >= wanted):
        time.sleep(0.01)
    return [list(map(int, line.split())) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_is_killed_and_what_fails_is_started_again_until_it_ends_well(start, tmp_path, gpus):
    """Of two ranks, both."""
    supervisor = start("5 kill\n9 1\n9 2\n", gpus=gpus)
    _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 2, said
    assert [furthest for _, furthest in workers(tmp_path)] == [0, 5, 9]
    assert "rank 0 on" in said
    assert [line for line in said.splitlines() if line.startswith("restart ")] == [
        "restart 1 of at most 99 now; furthest step 5",
        "restart 2 of at most 99 now; furthest step 9",
    ]
    assert said.count("; ending rank 1") == 3 * (gpus - 1)


@pytest.mark.parametrize(
    ("ends", "most", "restarts", "words"),
    [
        ([(0, 1)], 9, 0, ""),
        ([(0, 137), (0, 137), (3, 0)], 9, 2, "restart 2 of at most 9 in 0.01 s"),
        ([(5, 2)], 9, 0, ""),
        ([(5, 75)], 9, 0, ""),
        ([(5, 130)], 9, 0, ""),
        ([(5, 137), (6, 137)], 1, 1, "after 1 restart(s), as many as --restarts allows"),
        ([(5, 1)] * 9, 99, 1 + MAX_WITHOUT_PROGRESS, "no step beyond 5 in 6 tries: it would fail again"),
    ],
    ids=["fails at the start", "killed at the start", "flags", "preempted", "Ctrl-C", "too often", "the same step"],
)
def test_how_often(ends, most, restarts, words, monkeypatch):
    """ends: (the furthest step, the status) of each start."""
    said: list[str] = []
    monkeypatch.setattr(restarting, "_PAUSE_S", 0.01)
    monkeypatch.setattr(restarting, "_say", said.append)
    state = Restarts(most)
    again = []
    for step, status in ends:
        os.pwrite(state.file, struct.pack("q", step), 0)
        again.append(state.allows(status, []))
        if not again[-1]:
            break
    assert again == [True] * restarts + [False]
    assert words in " ".join(said)


def test_a_signal_in_the_pause_before_a_restart_ends_it(monkeypatch):
    monkeypatch.setattr(restarting, "_PAUSE_S", 60)
    state, signals = Restarts(9), []
    assert state.allows(137, signals)  # without a pause
    signals.append(signal.SIGTERM)
    assert not state.allows(137, signals)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_passed_on_and_nothing_is_started_again(number, start, tmp_path):
    supervisor = start("5 wait\n")
    workers(tmp_path, 1)
    supervisor.send_signal(number)
    assert supervisor.wait(60) == (75 if number == signal.SIGTERM else 200 + number)
    assert len(workers(tmp_path)) == 1
