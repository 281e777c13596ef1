"""`partial-fc checkpoint verify`: checks that all files exist and are unchanged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from partial_fc import terminal
from partial_fc.checkpoint.folders import MARKER, is_quarantined, is_step, steps_below


@dataclass(frozen=True)
class VerifyOptions:
    """Checks a checkpoint: every file is present and matches its checksum, every class is stored once, shapes and
    dtypes agree. Exit status 1 if there is a problem; each problem names its file."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """One checkpoint, or its folders if each host has its own; or a folder of checkpoints, which are all checked."""


def verify(options: VerifyOptions) -> int:
    """Prints the findings; returns the exit status."""
    alone = len(options.folders) > 1 or is_step(options.folders[0])
    if alone:
        groups: list[Sequence[Path]] = [options.folders]
    else:
        groups = [(folder,) for folder in steps_below(options.folders[0])]
    num_bad = num_checked = 0
    for group in groups:
        where = ", ".join(map(str, group))
        if len(groups) > 1 and is_quarantined(group[0]):
            print(f"{where}: quarantined, not checked")
            continue
        try:
            found = list(findings(group))
        except FileNotFoundError as error:
            found = [("bad", f"{error.filename} is missing")]
        if not alone and not (group[0] / MARKER).exists():  # a run writes it last, and removes it first
            print(f"{where}: incomplete (being written, abandoned, or removed meanwhile), not checked")
            continue
        num_checked += 1
        for kind, text in found:
            print(f"{kind}: {text}")
        num_problems = sum(kind == "bad" for kind, _ in found)
        print(f"{where}: {f'{num_problems} problem(s)' if num_problems else 'ok'}")
        num_bad += num_problems > 0
    return int(num_bad > 0 or not num_checked)


def findings(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yields ("bad" or "note", what) for the folders of one checkpoint: what a run that loads it would be told."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.checkpoint.read import Checkpoint
    from partial_fc.head.shard import Shard

    try:
        checkpoint = Checkpoint(*folders)
        tables = tables_in(checkpoint.manifest, checkpoint.where)
    except (ValueError, OSError) as error:  # nothing else can be checked then
        yield "bad", str(error)
        return
    size, ranks, told = checkpoint.world_size, checkpoint.ranks, set()
    for path in terminal.bar([*checkpoint.checksums], desc="checksums", unit="file", leave=False):
        try:
            checkpoint.check(path)
        except ValueError as error:
            told.add(str(error))
            yield "bad", str(error)
    if len(ranks) < size:
        yield ("note", f"these folders hold the files of ranks {sorted(ranks)} of {size}: the others' were not checked")
    for name, facts in tables.items():
        parts = [(0, 1)] if len(ranks) == size else [(rank, size) for rank in sorted(ranks)]
        for shard in (Shard.of(facts["num_classes"], *part) for part in parts):
            try:
                for _ in checkpoint.rows(shard.start, shard.stop, name).parts():
                    pass
            except (ValueError, OSError) as error:
                if str(error) not in told:
                    yield "bad", str(error)
