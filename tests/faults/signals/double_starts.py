"""Starts two runs in one folder, on one host and on two, again and again: one trains, the other one ends and says why.

    python -m tests.faults.signals.double_starts FOLDER --rounds 200 --seed 1                two hosts: as root

Who ends must name the other one's host and process. At the end of the one that trains its losses and its last
checkpoint are, bit for bit, those of a run that was alone, and no file is there that a run alone does not write. In one
round of ten the first is killed instead, and the second has to take its folder over and go on.
"""

import argparse
import json
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.two_hosts import TwoHosts, Unavailable, two_hosts
from tests.faults.signals.kill_matrix import check_equal, undisturbed
from tests.faults.signals.launches import PATIENCE_S, Started, set_pace

LAUNCHERS = ("own launch", "horovodrun --gloo", "run.sh", "torchrun")
NUM_STEPS = 24
_FLAGS = ["--checkpoint-every", "8", "--max-steps", str(NUM_STEPS)]
_PACE_S = 3.0  # until the other one has ended


def play(folder: Path, whole: Path, launcher: str, hosts: TwoHosts | None, random: Random) -> dict[str, Any]:
    """One round; whole: models_root of a run that was alone. Returns what was seen; AssertionError: more than one
    trained, or none. refused_s: from when the command of the one that was refused was typed, and the other one had the
    folder, to the end of the last process; typed_s: from when it was typed."""
    root, offset_s = folder / "run", random.choice((0.3, 4.0)) * random.random()
    kills = random.random() < 0.1
    for name in ("first", "second"):
        set_pace(folder / name, _PACE_S)
    started: list[Started] = []
    typed: dict[Started, float] = {}

    def start(name: str, host: int) -> Started:
        on = partial(hosts.start, host) if hosts else None
        begun = time.monotonic()
        started.append(Started(launcher, folder / name, _FLAGS, root, *([on] if on else [])))
        typed[started[-1]] = begun
        return started[-1]

    seen: dict[str, Any] = {"launcher": launcher, "hosts": 2 if hosts else 1, "offset_s": round(offset_s, 2)}
    try:
        first = start("first", 0)
        if kills:
            first.wait_until_it_trains(1 + random.randrange(10))
            first.kill()
            second = start("second", 1)
            set_pace(second.folder, 0)
            assert second.process.wait(PATIENCE_S) == 0, second.printed[-3000:]
            assert "lock taken over" in second.printed, second.printed[-3000:]
            seen["taken_over_s"] = round(_when(second, "held") - _when(second, "looked"), 2)
        else:
            time.sleep(offset_s)
            second = start("second", 1)
            loser = _ended_first(first, second)
            winner = second if loser is first else first
            ended = time.monotonic()
            seen["refused_s"] = round(ended - max(typed[loser], _when(winner, "held")), 2)
            seen["typed_s"] = round(ended - typed[loser], 2)
            seen["first_won"] = winner is first
            named = re.search(r"is in use by another run: process (\d+ on \S+), since", loser.printed)
            assert loser.process.returncode == 1, loser.printed[-3000:]
            assert named, loser.printed[-3000:]
            set_pace(winner.folder, 0)
            assert winner.process.wait(PATIENCE_S) == 0, winner.printed[-3000:]
            assert named[1] == (winner.folder / "rank-0").read_text().replace(" ", " on ")
    finally:
        for job in started:
            job.kill()
    check_equal(whole, root)
    assert _names(root) == _names(whole)
    return seen


def _ended_first(*jobs: Started) -> Started:
    """AssertionError: none has ended, or both have."""
    deadline = time.monotonic() + PATIENCE_S
    while not (ended := [job for job in jobs if job.process.poll() is not None and not job.left()]):
        assert time.monotonic() < deadline, "both train\n" + "\n".join(job.printed[-3000:] for job in jobs)
        time.sleep(0.01)
    assert len(ended) == 1, "none trains\n" + "\n".join(job.printed[-3000:] for job in jobs)
    return ended[0]


def _when(job: Started, what: str) -> float:
    """The first of its ranks."""
    return min(float(path.read_text()) for path in job.folder.glob(f"{what}-*"))


def _names(root: Path) -> set[str]:
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("tensorboard/")}  # host and process


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.signals.double_starts", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--begin", type=int, default=0, help="the number of the first round")
    parser.add_argument("--at-once", type=int, default=2)
    given = parser.parse_args()
    wrong: list[str] = []
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except Unavailable as reason:
            hosts = None
            print(f"on one host only: {reason}")
        whole = undisturbed(given.folder / "whole", _FLAGS)

        def one(number: int) -> dict[str, Any]:
            """Every launcher in turn, first on one host, then on two."""
            launcher, on_two = LAUNCHERS[number % 4], number // 4 % 2 == 1
            random = Random(f"{given.seed} {number}")
            try:
                seen = play(given.folder / str(number), whole, launcher, hosts if on_two else None, random)
            except AssertionError as error:
                wrong.append(f"round {number}, {launcher}: {error}")
                return {}
            print(json.dumps({"round": number, **seen}), flush=True)
            shutil.rmtree(given.folder / str(number))
            return seen

        with ThreadPoolExecutor(given.at_once) as pool:
            seen = [one for one in pool.map(one, range(given.begin, given.begin + given.rounds)) if one]
    print(json.dumps(_figures(seen)))
    print("\n".join(wrong) or f"{len(seen)} rounds, in each one trained")
    return bool(wrong)


def _figures(seen: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"rounds": len(seen), "on_two_hosts": sum(one["hosts"] == 2 for one in seen)}
    figures["second_won"] = sum(one.get("first_won") is False for one in seen)
    for what in ("refused_s", "typed_s", "taken_over_s"):
        seconds = sorted(one[what] for one in seen if what in one)
        if seconds:
            figures[what] = {"rounds": len(seconds), "median": seconds[len(seconds) // 2], "most": seconds[-1]}
    return figures


if __name__ == "__main__":
    sys.exit(main())
