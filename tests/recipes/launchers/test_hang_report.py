"""Launches in which a rank does not call a collective: the report, and that all processes end. All of them at once, as
they mostly wait."""

import json
import subprocess
import sys

import pytest

from tests.running import LAUNCHERS, ROOT, environment

pytestmark = pytest.mark.long

TIMEOUT_S = "4"
NOT_FINISHED = "collective t/hangs has not finished after 4 s. Step 7"
# way -> exit statuses by rank, None: it could not end; how many ranks report, None: timing decides; what all print
WAYS: dict[str, tuple[list[int | None], int | None, list[str]]] = {
    "sleeps": (
        [1, 1, 1],
        1,
        [
            f"{NOT_FINISHED}; call 1 of that name",
            "missing: rank 2 (host ",
            "has not started it. It is in step 7, last collective t/before, number 1, in recipes/hang.py:",
            " sleeps_here, called from",
            "waiting in it: ranks 0-1\n",
            "stacks of rank 2",
            "--comm-timeout",
            "in sleeps_here\n    time.sleep",  # its own stacks
        ],
    ),
    "rank 0 sleeps": ([1, 1, 1], 1, [NOT_FINISHED, "missing: rank 0 (host", "waiting in it: ranks 1-2\n"]),
    "is stopped": ([1, 1, None], 1, [NOT_FINISHED, "no sign of life", "network of rank 2"]),
    "rank 0 is stopped": ([None, 1, 1], 2, [NOT_FINISHED, "missing: rank 0"]),  # and its status server with it
    "is killed": ([1, 1, -9], None, ["missing: rank 2 (host", "no longer there: its process ended"]),
    "raises": ([1, 1, 1], None, ["ValueError: record 17 is damaged)"]),
    # What the program caught.
    "fails": ([1, 1, 1], None, ["missing: rank 2", "(it failed; ValueError: record 18 is damaged)"]),
    "rank 0 fails": ([1, 1, 1], None, ["missing: rank 0"]),  # and the store with it
    "is elsewhere": ([1, 1, 1], None, ["elsewhere: rank", "t/elsewhere", "t/hangs", "different paths"]),
    "is late": ([0, 0, 0], 0, [f"rank {rank} is through\n" for rank in range(3)]),
}
SLEEPS = [f"rank 0: {NOT_FINISHED}; call 1 of that name", "missing: rank 1 (host ", "last collective t/before"]
# A launch over torch.distributed is among WAYS too; here the launcher has its own say in the end of the others.
LAUNCHES = {
    "horovodrun --gloo": ("is elsewhere", ["elsewhere: rank", "different paths"]),
    "horovodrun --mpi": ("sleeps", SLEEPS),
    "torchrun": ("sleeps", SLEEPS),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(folder of `hang.start_ranks`, outcomes of LAUNCHES: exit status and output)."""
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
        for launcher, (way, _) in LAUNCHES.items()
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


@pytest.mark.parametrize("way", WAYS)
def test_who_is_missing_and_why_is_reported_and_all_end(started, way):
    expected, num_reports, words = WAYS[way]
    statuses = json.loads((started[0] / "statuses").read_text())[way]
    outputs = [(started[0] / f"{way}.{rank}").read_text() for rank in range(len(statuses))]
    assert statuses == expected
    assert num_reports in (None, sum("has not finished" in text for text in outputs)), outputs
    assert [each for each in words if each not in "".join(outputs)] == [], outputs


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_every_launcher_shows_the_report_and_ends(started, launcher):
    status, output = started[1][launcher]
    assert status != 0
    assert [each for each in LAUNCHES[launcher][1] if each not in output] == [], output
