"""`bash run.sh --restarts N` with an mpirun that fails as each test wants, again and again, or gets its signals then.
tests/faults/signals/test_kill_matrix.py has real ones: a process is lost, and SIGTERM."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.house.test_setup import script
from tests.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TOGETHER_S = 1.1  # signals within a second are one

# Try number n does line n of the plan: STEP of the checkpoint that it writes (0: none), then a command that ends it.
MPIRUN = """#!/bin/bash
here=$(dirname "$0")
echo "$@" >> "$here/calls"
read -r step end < <(sed -n "$(wc -l < "$here/calls")p" "$here/plan")
if [ "$step" != 0 ]; then
    mkdir -p "$CHECKPOINTS/step-$step"
    touch "$CHECKPOINTS/step-$step/COMPLETE"
fi
eval "$end"
"""


@pytest.fixture
def start(tmp_path):
    """Starts run.sh, whose mpirun follows the plan."""
    script(tmp_path / "bin/mpirun", MPIRUN)
    shutil.copy(ROOT / "run.sh", tmp_path)
    # Of the trainer only what run.sh asks it: where it writes without a flag that says so.
    (tmp_path / "config.sh").write_text('echo "runs/of $PARTIAL_FC_WHERE $*/checkpoints"\n')
    shutil.copytree(ROOT / "hosts", tmp_path / "hosts")
    started = []

    def start(
        plan: str, *words: str, checkpoints: str = "runs/of 1 /checkpoints", pause_s: str = "0"
    ) -> subprocess.Popen:
        (tmp_path / "bin/plan").write_text(plan)
        environ = os.environ | {"CHECKPOINTS": str(tmp_path / checkpoints), "RESTART_PAUSE_S": pause_s}
        environ["PATH"] = f"{tmp_path / 'bin'}:{environ['PATH']}"
        environ.pop("MODELS_ROOT", None)
        command = ["bash", "run.sh", *words]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def outcome(process: subprocess.Popen, tmp_path: Path) -> tuple[int, str, list[str]]:
    """(exit status, what it printed, the command lines that mpirun got)."""
    _, printed = process.communicate(timeout=60)
    return process.returncode, printed, (tmp_path / "bin/calls").read_text().splitlines()


def test_an_error_that_comes_again_before_a_checkpoint_is_not_tried_for_ever(start, tmp_path):
    status, printed, calls = outcome(start("0 exit 1\n" * 9, "--restarts=8"), tmp_path)
    assert (status, len(calls)) == (1, 2)
    assert calls[1].endswith("config.sh"), "there is nothing to go on from"
    assert "no newer checkpoint than none in two tries" in printed
    assert f"(looked for in runs/of 1 /checkpoints on {socket.gethostname()}: this host must see" in printed
    plan = "0 exit 1\n00000001 exit 1\n0 exit 1\n0 exit 9\n0 exit 0\n"
    (tmp_path / "bin/calls").unlink()
    status, printed, calls = outcome(start(plan, "--restarts=8"), tmp_path)
    assert (status, len(calls)) == (9, 4), "progress between two failures makes the count begin anew"


@pytest.mark.parametrize(("status", "flag"), [(2, "--restarts=2"), (130, "--restarts=2"), (1, "--lr=1")])
def test_what_is_no_failure_is_passed_on_and_so_is_any_without_the_flag(start, tmp_path, status, flag):
    ended, printed, calls = outcome(start(f"00000001 exit {status}\n", flag), tmp_path)
    assert (ended, printed, len(calls)) == (status, "", 1)


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        (["--models-root", "a b"], "a b/checkpoints"),
        (["--models_root=c"], "c/checkpoints"),
        (["--checkpoint-dir", "d", "--models-root", "c"], "d"),
    ],
)
def test_the_flags_say_where_checkpoints_are(start, tmp_path, flags, folder):
    plan = "00000001 exit 1\n00000002 exit 1\n00000003 exit 0\n"
    (tmp_path / folder / "step-00000009.damaged").mkdir(parents=True)
    (tmp_path / folder / "step-00000009.damaged/COMPLETE").touch()  # set aside: no checkpoint
    status, printed, calls = outcome(start(plan, "--restarts", "5", *flags, checkpoints=folder), tmp_path)
    assert status == 0
    assert calls[0].endswith(f"config.sh {' '.join(flags)}")
    assert calls[2].endswith(f"config.sh {' '.join(flags)} --resume auto")
    assert f"from {folder}/step-00000001/COMPLETE" in printed


def wait_for(path: Path, num_lines: int = 0) -> None:
    until(lambda: path.exists() and path.read_text().count("\n") >= num_lines)


def test_a_second_sigterm_does_not_wait_unless_it_comes_together_with_the_first(start, tmp_path):
    """As those of timeout(1), which sends one to the command and one to its process group."""
    plan = "0 trap 'touch $here/got' USR1; trap 'exit 143' TERM; touch $here/up; while :; do sleep 0.02; done\n"
    process = start(plan, "--restarts", "3")
    wait_for(tmp_path / "bin/up")
    process.send_signal(signal.SIGSTOP)  # it then finds two at once, however busy the machine is
    process.terminate()
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGCONT)
    wait_for(tmp_path / "bin/got")
    time.sleep(TOGETHER_S)
    assert process.poll() is None
    process.terminate()
    status, _, calls = outcome(process, tmp_path)
    assert (status, len(calls)) == (143, 1)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_in_the_pause_ends_it_with_nothing_running(start, tmp_path, number, expected):
    process = start("0 exit 1\n00000002 exit 0\n", "--restarts", "3", pause_s="100")
    assert "restart 1 of at most 3 in 100 s" in process.stderr.readline()
    process.send_signal(number)
    status, _, calls = outcome(process, tmp_path)
    assert (status, len(calls)) == (expected, 1)
