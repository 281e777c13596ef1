"""Rehearsal on your hosts: kills ranks of a training, starts it again, compares its losses with an undisturbed run's.

    python -m tests.faults.torture FOLDER --mean-steps 50 -H hosts/host_16 -- COMMAND ...

COMMAND repeats bit by bit and takes --models-root as its last flag: FOLDER/undisturbed, then FOLDER/disturbed. All
hosts see FOLDER. After some steps, drawn by --seed, one rank is killed, here or over ssh; a COMMAND that ends is
started again. Exit status 0: each step counted once, with an equal loss, and the last checkpoints stand at the same
place in the data. Only processes of yours that have FOLDER/disturbed on their command line are killed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median
from typing import IO

import numpy as np
import psutil

from partial_fc.checkpoint.folders import MANIFEST, newest
from partial_fc.comm.launch.hosts import Host, HostError, parse
from partial_fc.train.record.curve import read_losses

_MARK = "torture: "
_ANSWER_S = 20.0
_MOST_FRUITLESS = 20  # starts in a row without a new step


def ranks(root: str) -> list[psutil.Process]:
    """The processes here that train below `root`: Python's, without children. Launchers and supervisors have some."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.uids().real == os.getuid() and any(root in word for word in process.cmdline())
            if ours and "python" in process.exe() and process.pid != os.getpid() and not process.children():
                found.append(process)
    return found


def kill_one(root: str, share: float) -> bool:
    """Kills the rank here at this share of the list; returns whether there was one."""
    if found := ranks(root):
        with suppress(psutil.NoSuchProcess):
            found[int(share * len(found))].kill()
    return bool(found)


def kill_on(host: Host, root: str, share: float) -> bool:
    if host.is_here:
        return kill_one(root, share)
    with suppress(HostError):  # it may be away for a while
        return host.run_module("tests.faults.torture", [root, "--kill", str(share)], _MARK, _ANSWER_S)
    return False


def steps_done(root: Path) -> int:
    return int(rows[-1, 0]) if len(rows := read_losses(root)) else 0


def started(command: list[str], root: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    words = [*command, "--models-root", str(root)]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def disturb(
    command: list[str], root: Path, output: IO[bytes], hosts: list[Host], mean_steps: float, random: Random
) -> tuple[int, int, list[float]]:
    """Trains to the end. Returns kills, starts, and the seconds from each kill to the first step beyond it. Raises
    ValueError if the run makes no progress."""
    kills, starts, furthest, fruitless = 0, 0, 0, 0
    struck: tuple[float, int] | None = None  # time and furthest step of a kill that is not made good yet
    recoveries_s: list[float] = []
    due = max(1, round(random.expovariate(1 / mean_steps)))
    while True:
        process, begin = started(command, root, output), furthest
        starts += 1
        while process.poll() is None:
            time.sleep(0.05)
            step = steps_done(root)
            furthest = max(furthest, step)
            if struck and furthest > struck[1]:
                recoveries_s.append(time.monotonic() - struck[0])
                struck = None
            if step >= due and not struck and kill_on(random.choice(hosts), str(root), random.random()):
                kills, struck = kills + 1, (time.monotonic(), furthest)
                due = furthest + max(1, round(random.expovariate(1 / mean_steps)))
        if process.returncode == 0:
            return kills, starts, recoveries_s
        fruitless = fruitless + 1 if furthest == begin else 0
        if fruitless == _MOST_FRUITLESS:
            raise ValueError(f"{fruitless} starts brought no step beyond {furthest}: see the end of {output.name}")


def differences(undisturbed: Path, disturbed: Path, tolerance: float) -> list[str]:
    """What tells the runs apart."""
    whole, other = read_losses(undisturbed), read_losses(disturbed)
    if not len(whole) or not np.array_equal(whole[:, 0], other[:, 0]):
        return [f"loss.csv has {len(other)} rows, undisturbed {len(whole)}; expected each step once"]
    found = []
    close = np.isclose(other[:, 1], whole[:, 1], rtol=tolerance, atol=0, equal_nan=True)
    if not close.all():
        first = int(close.argmin())
        found.append(
            f"{int((~close).sum())} of {len(whole)} losses differ, first at step {int(whole[first, 0])}: "
            f"{other[first, 1]:.9g}, undisturbed {whole[first, 1]:.9g}"
        )
    last = [newest(root / "checkpoints") for root in (undisturbed, disturbed)]
    one, two = (json.loads((folder / MANIFEST).read_text()) if folder else {} for folder in last)
    names = [name for name in ("step", "position", "left_out") if one.get(name) != two.get(name)]
    return found + [f"last checkpoint: {name} is {two.get(name)}, undisturbed {one.get(name)}" for name in names]


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.torture", usage="%(prog)s FOLDER [flags] -- COMMAND ..."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mean-steps", type=float, default=50, help="between two kills (50)")
    parser.add_argument("--seed", type=int, default=1, help="of moments and victims (1)")
    parser.add_argument(
        "-H", "--hosts", default="localhost", help="a:8,b:8 or a host file; this host alone if not given"
    )
    parser.add_argument("--tolerance", type=float, default=1e-9, help="relative, of a loss (1e-9)")
    parser.add_argument("--kill", type=float, help=argparse.SUPPRESS)  # what a host is asked
    given, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if given.kill is not None:
        print(f"{_MARK}{json.dumps(kill_one(str(given.folder), given.kill))}")
        return 0
    folder = given.folder.absolute()
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    if not command or disturbed.exists():
        parser.error(
            f"{disturbed} exists: remove it" if command else "no COMMAND; expected flags, then --, then COMMAND"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("ab") as output:
        if not (undisturbed / "result.json").exists() and (status := started(command, undisturbed, output).wait()):
            raise SystemExit(f"undisturbed, the command ended with status {status}: see the end of {output.name}")
        begin = time.monotonic()
        kills, starts, recoveries_s = disturb(
            command, disturbed, output, parse(given.hosts), given.mean_steps, Random(given.seed)
        )
    print(f"{kills} kills, {starts} starts of the command, {time.monotonic() - begin:.0f} s")
    if recoveries_s:
        print(
            f"from a kill to the next new step: median {median(recoveries_s):.1f} s, longest {max(recoveries_s):.1f} s"
        )
    found = differences(undisturbed, disturbed, given.tolerance)
    print("\n".join(found) or "EQUAL: each step once, with its loss")
    return 1 if found else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
