"""Kills ranks at random moments, the checkpoint's writer included, and starts the run again, many times:

    python -m tests.faults.kills FOLDER --rounds 50 --seed 1

After each kill every folder with a marker must verify, and no checkpoint that was complete may be gone for good: the
next start goes on from the newest. At the end the files of the last checkpoint and all losses must be, bit for bit,
those of a run that nobody disturbed. AssertionError: they are not.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

from partial_fc.verbs.checkpoint.verify import findings
from tests.faults.ranks import flags, train
from tests.running import PATIENCE_S, Ranks, same_tensors, steps_done

EVERY = 2  # steps between two checkpoints
# When a rank is killed: before the first step, between steps, while files are written, when a folder got its marker.
MOMENTS = ("starts", "steps", "writes", "marks")
# What may differ: where it runs and when.
_OTHER = ("models_root", "checkpoint_dir", "time", "seconds", "written", "hosts")


def complete(models_root: Path) -> list[Path]:
    """Oldest first."""
    return sorted(marker.parent for marker in (models_root / "checkpoints").glob("step-*/COMPLETE"))


def attack(folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Returns figures."""
    random = Random(seed)
    num_steps = 8 * rounds + 16
    whole, killed = folder / "whole", folder / "killed"
    assert Ranks(folder / "output-whole", train, flags(whole, num_steps, EVERY)).wait(PATIENCE_S + 2 * num_steps) == [
        0,
        0,
    ]
    counts = dict.fromkeys(MOMENTS, 0)
    lost: list[int] = []
    for number in range(rounds):
        before, losses = complete(killed), _losses(killed)
        moment = MOMENTS[number % len(MOMENTS)]
        running = Ranks(folder / "output-killed", train, flags(killed, num_steps, EVERY))
        had_ended = _wait_for(moment, running, killed, random)
        victims = random.choice(([0], [1], [0, 1]))
        for rank in victims:
            running.signal(rank)
        statuses = running.wait()  # the other ranks notice and end, too
        if not had_ended and any(statuses):
            counts[moment] += 1
        _check_resumed(running, before, _losses(killed) != losses)
        check_whole(killed)
        newest = complete(killed)
        lost.append(steps_done(killed) - (_step(newest[-1]) if newest else 0))
        assert not before or _step(newest[-1]) >= _step(before[-1]), f"round {number}: a complete checkpoint is gone"
    before, losses = complete(killed), _losses(killed)
    last = Ranks(folder / "output-killed", train, flags(killed, num_steps, EVERY))
    assert last.wait(PATIENCE_S + 2 * num_steps) == [0, 0], last.output()
    _check_resumed(last, before, _losses(killed) != losses)
    check_equal(whole, killed, num_steps)
    return {"rounds": rounds, "seed": seed, "killed": counts, "steps": num_steps, "most_steps_lost": max(lost)}


def _wait_for(moment: str, running: Ranks, models_root: Path, random: Random) -> bool:
    """Returns when it is time to kill; True: all had ended before."""
    if moment == "starts":
        time.sleep(random.uniform(0, 3))
        return running.poll()
    begin, seen = steps_done(models_root), set(complete(models_root))
    # It may go back to an older step first, so steps are counted from a new line on.
    assert running.until(lambda: steps_done(models_root) != begin), f"no step\n{running.output()}"
    if moment == "steps":
        stop = steps_done(models_root) + random.randrange(1, 6)
        running.until(lambda: steps_done(models_root) >= stop)
    elif moment == "writes":
        wanted = random.choice(("head-*.partial", "backbone*", "*.sha256", "head-00001*", "manifest.json"))
        running.until(lambda: any(_unmarked(models_root, wanted)))
        time.sleep(random.choice((0, 0, 0.002, 0.01)))
    else:
        running.until(lambda: bool(set(complete(models_root)) - seen))
        time.sleep(random.choice((0, 0.001, 0.005)))  # older ones are being removed now
    return running.poll()


def _unmarked(models_root: Path, wanted: str) -> list[Path]:
    found = (models_root / "checkpoints").glob(f"step-*/{wanted}")
    return [path for path in found if not (path.parent / "COMPLETE").exists()]


def _losses(models_root: Path) -> bytes:
    path = models_root / "loss.csv"
    return path.read_bytes() if path.exists() else b""


def _check_resumed(running: Ranks, before: list[Path], trained: bool) -> None:
    """From the newest that was complete, if it came so far as to say so. trained: it changed loss.csv, which no start
    does before that."""
    printed = running.output(0)
    if before and "resumed from" in printed:
        assert f"resumed from {before[-1]}" in printed, printed[-3000:]
    elif before and trained:
        raise AssertionError(f"started anew, though {before[-1]} is complete\n{printed[-3000:]}")


def check_whole(models_root: Path) -> None:
    for folder in complete(models_root):
        bad = [text for kind, text in findings([folder], finite=True) if kind == "bad"]
        assert not bad, f"{folder} counts, but: {bad}"


def check_equal(whole: Path, killed: Path, num_steps: int) -> None:
    one, two = complete(whole)[-1], complete(killed)[-1]
    assert _step(one) == _step(two) == num_steps
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    same_tensors(one, two)
    manifests = [_without(json.loads((folder / "manifest.json").read_text())) for folder in (one, two)]
    assert manifests[0] == manifests[1]
    assert (whole / "loss.csv").read_text() == (killed / "loss.csv").read_text()


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in _OTHER}
    return value


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.kills", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    start = time.monotonic()
    figures = attack(options.folder, options.rounds, options.seed)
    print(json.dumps({**figures, "seconds": round(time.monotonic() - start)}), flush=True)


if __name__ == "__main__":
    main()
