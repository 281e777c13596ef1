"""Finds and kills the processes of a run on one host: python -m ...torture.victims FOLDER [PID ...]

A run's processes are this user's with its folder on their command line. Ranks are the Python processes among them with
a rank from a launcher, or that train without one; the rest are launchers and shells. With process ids: each that still
belongs to the run gets SIGKILL. Standard library only; the last line is JSON.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "python -m tests.faults.torture: "
# The launchers' variables of a rank (comm/launch/detect.py).
_RANKS = tuple(
    name.encode() for name in ("HOROVOD_RANK=", "OMPI_COMM_WORLD_RANK=", "PMI_RANK=", "SLURM_PROCID=", "RANK=")
)


def processes(folder: str) -> dict[int, bool]:
    """Returns the run's processes here: id -> whether it is a rank."""
    found: dict[int, bool] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # ended meanwhile, or another user's
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if entry.stat().st_uid == os.getuid() and _is_of(folder, words):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found[int(entry.name)] = _is_rank(words, (entry / "environ").read_bytes())
    return found


def _is_rank(words: list[str], environ: bytes) -> bool:
    if not os.path.basename(words[0]).startswith("python"):
        return False
    if any(word.startswith("--restarts") for word in words):  # else it is their supervisor (comm/launch/spawn.py)
        return any(variable.startswith(b"PARTIAL_FC_PARENT=") for variable in environ.split(b"\0"))
    if any(variable.startswith(_RANKS) for variable in environ.split(b"\0")):
        return True
    began = [os.path.basename(words[1]), *words[2:4]]
    trains = began[0] == "train.py" or began[:2] == ["partial-fc", "train"] or began == ["-m", "partial_fc", "train"]
    return trains and not any(word.startswith(("--gpus", "--nodes")) for word in words)


def _is_of(folder: str, words: list[str]) -> bool:
    """Tells whether a command line contains the folder; a shell's has it inside a word. Excludes this module's own."""
    if any("tests.faults.torture.victims" in word for word in words):
        return False
    return any(folder in (word, *word.replace("'", " ").replace("=", " ").split()) for word in words)


def kill(folder: str, pids: list[int]) -> list[int]:
    """Kills those that belong to the run and returns them."""
    killed = []
    for pid in pids:
        if pid in processes(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def main(arguments: list[str]) -> None:
    folder, *numbers = arguments
    answer: Any = kill(folder, [int(number) for number in numbers]) if numbers else processes(folder)
    print(f"{MARK}{json.dumps(answer)}")


if __name__ == "__main__":
    main(sys.argv[1:])
