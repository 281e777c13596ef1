"""Launches in which a rank does not call a collective: the report, and that all processes end. All of them at once, as
they mostly wait."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.conftest import LAUNCHERS, ROOT, environment

pytestmark = pytest.mark.long

TIMEOUT_S = "4"
WAYS = (
    "sleeps",
    "is stopped",
    "is killed",
    "raises",
    "fails",
    "rank 0 fails",
    "is elsewhere",
    "is late",
    "rank 0 sleeps",
    "rank 0 is stopped",
)
# A launch over torch.distributed is among WAYS too; here the launcher has its own say in the end of the others.
LAUNCHES = {"horovodrun --gloo": "is elsewhere", "horovodrun --mpi": "sleeps", "torchrun": "sleeps"}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(folder of `hang.become_a_rank`, outcomes of LAUNCHES: exit status and output)."""
    folder = tmp_path_factory.mktemp("hang")
    command = [sys.executable, "-m", "tests.recipes.hang"]
    by_hand = subprocess.Popen([*command, str(folder), TIMEOUT_S, *WAYS], cwd=ROOT, env=environment())
    launched = {
        launcher: subprocess.Popen(
            [*LAUNCHERS[launcher], *command, way, TIMEOUT_S],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for launcher, way in LAUNCHES.items()
    }
    outcomes = {}
    try:
        for key, process in launched.items():
            output, _ = process.communicate(timeout=170)
            outcomes[key] = process.returncode, output
        assert by_hand.wait(timeout=170) == 0
    finally:
        for process in (by_hand, *launched.values()):
            process.kill()
    return folder, outcomes


def outcome(started, way: str) -> tuple[list[int | None], list[str]]:
    """(exit statuses, None for a process that could not end; outputs), by rank."""
    folder: Path = started[0]
    statuses = json.loads((folder / "statuses").read_text())[way]
    return statuses, [(folder / f"{way}.{rank}").read_text() for rank in range(len(statuses))]


def report(outputs: list[str], name: str = "t/hangs") -> str:
    """The only one."""
    found = [text for text in outputs if f"collective {name} has not finished" in text]
    assert len(found) == 1, outputs
    words = found[0][found[0].index("collective t/hangs has not finished") :]
    assert words.startswith("collective t/hangs has not finished after 4 s. Step 7; call 1 of that name")
    return words


def test_a_rank_that_does_not_come_is_named_with_the_code_that_it_is_in(started):
    statuses, outputs = outcome(started, "sleeps")
    words = report(outputs)
    assert statuses == [1, 1, 1]
    assert "missing: rank 2 (host " in words
    assert "has not started it. It is in step 7, last collective t/before, number 1, in recipes/hang.py:" in words
    assert " sleeps_here, called from" in words
    assert "waiting in it: ranks 0-1\n" in words
    assert "in sleeps_here\n    time.sleep" in outputs[2], "its own stacks"


def test_a_stopped_rank_gives_no_sign_of_life(started):
    statuses, outputs = outcome(started, "is stopped")
    assert statuses == [1, 1, None]
    assert "no sign of life" in (words := report(outputs))
    assert "network of rank 2" in words


def test_the_collective_of_a_killed_rank_fails_and_names_it(started):
    statuses, outputs = outcome(started, "is killed")
    assert statuses[2] == -9
    assert statuses[0] == statuses[1] == 1
    told = [text for text in outputs[:2] if "CollectiveError: collective t/hangs failed on rank" in text]
    told += [text for text in outputs[:2] if "collective t/hangs has not finished" in text]
    assert told
    for text in told:
        assert "missing: rank 2 (host" in text
        assert "no longer there: its process ended" in text
        assert "output and the host of rank 2" in text or "output of rank 2" in text


def test_what_ended_a_rank_is_passed_on(started):
    statuses, outputs = outcome(started, "raises")
    assert statuses == [1, 1, 1]
    assert any("ValueError: record 17 is damaged)" in text for text in outputs[:2])


@pytest.mark.parametrize(("way", "bad"), [("fails", 2), ("rank 0 fails", 0)])
def test_what_a_program_caught_is_passed_on(started, way, bad):
    statuses, outputs = outcome(started, way)
    assert statuses == [1, 1, 1]
    told = [text for rank, text in enumerate(outputs) if rank != bad and f"missing: rank {bad}" in text]
    assert told, outputs
    assert any("(it failed; ValueError: record 18 is damaged)" in text for text in told)


def test_ranks_in_different_collectives_are_told_apart(started):
    statuses, outputs = outcome(started, "is elsewhere")
    assert statuses == [1, 1, 1]
    assert "elsewhere" in (words := "".join(outputs))
    assert "t/elsewhere" in words
    assert "t/hangs" in words
    assert "different paths" in words


def test_a_rank_below_the_timeout_alarms_nobody(started):
    statuses, outputs = outcome(started, "is late")
    assert statuses == [0, 0, 0]
    assert outputs == [f"rank {rank} is through\n" for rank in range(3)]


def test_rank_0_may_be_the_missing_one(started):
    statuses, outputs = outcome(started, "rank 0 sleeps")
    assert statuses == [1, 1, 1]
    assert "missing: rank 0 (host" in (words := report(outputs))
    assert "waiting in it: ranks 1-2\n" in words


def test_rank_0_may_be_stopped_and_its_board_with_it(started):
    statuses, outputs = outcome(started, "rank 0 is stopped")
    assert statuses == [None, 1, 1]
    for text in outputs[1:]:
        assert "collective t/hangs has not finished after 4 s. Step 7" in text
        assert "missing: rank 0" in text


@pytest.mark.parametrize("launcher", [launcher for launcher, way in LAUNCHES.items() if way == "sleeps"])
def test_every_launcher_shows_the_report_and_ends(started, launcher):
    status, output = started[1][launcher]
    assert status != 0
    assert "rank 0: collective t/hangs has not finished after 4 s. Step 7; call 1 of that name" in output
    assert "missing: rank 1 (host " in output
    assert "has not started it. It is in step 7, last collective t/before" in output


def test_horovod_ranks_in_different_collectives(started):
    status, output = started[1]["horovodrun --gloo"]
    assert status != 0
    assert "elsewhere: rank" in output
    assert "different paths" in output
