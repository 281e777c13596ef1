"""The restart agent of a rank (`--restarts`) starts it again where it fails, and nothing else. One of a training:
tests/recipes/launchers/test_torture.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partial_fc.comm.launch.restart_agent import MAX_WITHOUT_PROGRESS, NAME

# Worker number n does line n of the plan: STEP that it comes to, then how it ends: a status, or "kill", or "wait".
JOB = """
import os, signal, sys, time
from partial_fc.comm.launch import restart_agent
restart_agent._PAUSE_S = 0.01
status = restart_agent.keep(int(sys.argv[2]), 3, False)
if status is not None:
    sys.exit(status)
for number in restart_agent._PASSED_ON:
    signal.signal(number, lambda number, _: os._exit(200 + number))
with open(sys.argv[1] + "/workers", "a") as file:
    file.write(f"{os.getpid()} {restart_agent.furthest_step()}\\n")
number = len(open(sys.argv[1] + "/workers").readlines())
step, end = open(sys.argv[1] + "/plan").read().splitlines()[number - 1].split()
restart_agent.step_done(int(step))
if end == "wait":
    time.sleep(60)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(int(end))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a agent whose workers follow the plan."""
    started = []

    def start(plan: str, restarts: int = 99) -> subprocess.Popen:
        (tmp_path / "plan").write_text(plan)
        words = [sys.executable, "-c", JOB, str(tmp_path), str(restarts)]
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


def test_what_is_killed_and_what_fails_is_started_again_until_it_ends_well(start, tmp_path):
    agent = start("5 kill\n9 1\n9 0\n")
    _, said = agent.communicate(timeout=60)
    assert agent.returncode == 0, said
    assert [furthest for _, furthest in workers(tmp_path)] == [0, 5, 9]
    assert said.splitlines() == [
        "rank 3: ended with signal 9 (Killed); restart 1 of at most 99 now; furthest step 5",
        "rank 3: ended with status 1; restart 2 of at most 99 now; furthest step 9",
    ]


@pytest.mark.parametrize(
    ("plan", "restarts", "status", "num_workers", "words"),
    [
        ("0 1\n", 9, 1, 1, ""),
        ("0 kill\n0 kill\n3 0\n", 9, 0, 3, "restart 2 of at most 9 in 0.01 s"),
        ("5 2\n", 9, 2, 1, ""),
        ("5 75\n", 9, 75, 1, ""),
        ("5 130\n", 9, 130, 1, ""),
        ("5 kill\n6 kill\n7 0\n", 1, 137, 2, "after 1 restart(s), as many as --restarts allows"),
        ("5 1\n" * 9, 99, 1, 2 + MAX_WITHOUT_PROGRESS, "no step beyond 5 in 6 tries: it would fail again"),
    ],
    ids=["fails at the start", "killed at the start", "flags", "preempted", "Ctrl-C", "too often", "the same step"],
)
def test_how_often(plan, restarts, status, num_workers, words, start, tmp_path):
    agent = start(plan, restarts)
    _, said = agent.communicate(timeout=60)
    assert (agent.returncode, len(workers(tmp_path))) == (status, num_workers), said
    assert words in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_passed_on_and_nothing_is_started_again(number, start, tmp_path):
    agent = start("5 wait\n")
    (worker,) = workers(tmp_path, 1)
    comm = Path(f"/proc/{agent.pid}/comm").read_text().strip()
    assert (comm, len(os.listdir(f"/proc/{agent.pid}/task"))) == (NAME, 1)
    assert Path(f"/proc/{worker[0]}/comm").read_text().strip() != NAME
    agent.send_signal(number)
    assert agent.wait(60) == 200 + number


def test_a_signal_before_there_is_a_worker_ends_the_agent(tmp_path):
    early = """
import signal
block = signal.pthread_sigmask
def raise_and_block(how, numbers):
    if how == signal.SIG_BLOCK:
        signal.raise_signal(signal.SIGTERM)
    return block(how, numbers)
signal.pthread_sigmask = raise_and_block
"""
    (tmp_path / "plan").write_text("0 0\n")
    words = [sys.executable, "-c", early + JOB, str(tmp_path), "9"]
    assert subprocess.run(words, timeout=60).returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "workers").exists()


def test_a_worker_ends_with_its_agent(start, tmp_path):
    agent = start("5 wait\n")
    (worker,) = workers(tmp_path, 1)
    agent.kill()
    agent.wait()
    while Path(f"/proc/{worker[0]}").exists() and "Z" not in Path(f"/proc/{worker[0]}/stat").read_text().split()[2]:
        time.sleep(0.01)
