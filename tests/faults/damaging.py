"""Checkpoints that are damaged in random places: a byte of a file is flipped, a file cut short, or removed."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from partial_fc.checkpoint.folders import MARKER, folder_name

KINDS = ("flip", "cut", "remove")


@dataclass
class Done:
    """What was done to the checkpoints, and what is to be seen of it."""

    whole: int  # the newest step that nobody has touched
    unmarked: set[int] = field(default_factory=set)  # steps that have lost a marker: no longer checkpoints
    kinds: Counter[str] = field(default_factory=Counter)


def damage(path: Path, kind: str, random: Random) -> None:
    """Changes a file so that it says something else, or nothing."""
    content = path.read_bytes()
    while True:
        if kind == "remove" or not content:
            path.unlink()
            return
        at = random.randrange(len(content))
        changed = content[:at]
        if kind == "flip":
            changed += bytes([content[at] ^ random.randrange(1, 256)]) + content[at + 1 :]
        path.write_bytes(changed)
        if not _says_the_same(path, content):
            return


def _says_the_same(path: Path, content: bytes) -> bool:
    """White space in a marker, or the end of a list's last line, is no damage."""
    try:
        if path.name == MARKER:
            return json.loads(path.read_bytes()) == json.loads(content)
        return path.suffix == ".sha256" and path.read_bytes() == content.removesuffix(b"\n")
    except ValueError:
        return False


def damage_newest(roots: list[Path], random: Random, steps: tuple[int, ...], spare: str = "none") -> Done:
    """Of the newest 1 to all but one. spare: in names of files that nobody misses."""
    num_damaged = random.randrange(1, len(steps))
    done = Done(steps[-1 - num_damaged])
    for step in steps[-num_damaged:]:
        folders = [root / "checkpoints" / folder_name(step) for root in roots]
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            files = sorted(path for folder in folders for path in folder.iterdir() if spare not in path.name)
            # Of a host's two or ten files most are of the head: small ones are to be met as often.
            name = random.choice(sorted({path.suffix or path.name for path in files}))
            path = random.choice([path for path in files if (path.suffix or path.name) == name])
            kind = random.choice(KINDS)
            damage(path, kind, random)
            done.kinds[kind] += 1
            done.kinds[name] += 1
        if not all((folder / MARKER).exists() for folder in folders):
            done.unmarked.add(step)
    return done
