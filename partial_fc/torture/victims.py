"""The processes of a run on one host, found and killed there: python -m partial_fc.torture.victims FOLDER [PID ...]

A run's processes are those of this user that have its folder on their command line. Its ranks are the Python processes
among them that have started none of the others; the rest are launchers and shells. With numbers of processes: each that
is still one of the run's gets SIGKILL. Standard library only; the last line is JSON.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "partial-fc torture: "


def processes(folder: str) -> dict[int, dict[str, Any]]:
    """Number -> {"parent", "rank"} of the run's processes here."""
    parent_of: dict[int, int] = {}
    program_of: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if entry.stat().st_uid == os.getuid() and _is_of(folder, words) and state not in "ZX":
                parent_of[int(entry.name)], program_of[int(entry.name)] = int(parent), os.path.basename(words[0])
    starters = set(parent_of.values())
    return {
        pid: {"parent": parent, "rank": pid not in starters and program_of[pid].startswith("python")}
        for pid, parent in parent_of.items()
    }


def _is_of(folder: str, words: list[str]) -> bool:
    """Whether a command line names the folder; that of a shell has it within a word. Not those that look for it."""
    if any("partial_fc.torture.victims" in word for word in words):
        return False
    return any(folder in (word, *word.replace("'", " ").replace("=", " ").split()) for word in words)


def kill(folder: str, pids: list[int]) -> list[int]:
    """Kills those of them that are of the run; returns which those were."""
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
