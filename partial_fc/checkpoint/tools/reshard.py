"""`partial-fc checkpoint merge` and `reshard`: the files of W ranks become those of another number."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor

from partial_fc.checkpoint.head_state import hard_negatives_name
from partial_fc.checkpoint.output import Output, say
from partial_fc.checkpoint.snapshot import local_name
from partial_fc.checkpoint.tools.checkpoint_on_disk import CheckpointOnDisk, describe
from partial_fc.optim.compression import merge_residuals

_FORMAT_3_LOCAL = "exchange-{:05d}-of-{:05d}.safetensors"  # format 3


@dataclass(frozen=True)
class MergeOptions:
    """One set of files, as one process would have written it. (Training needs none of this: any number of ranks loads
    what any other wrote.)"""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """A checkpoint, or a folder whose newest counts; several where each host has written into a folder of its own."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""


@dataclass(frozen=True)
class ReshardOptions:
    """The files that another number of ranks would have written, bit for bit the same rows: for hosts that each have
    a folder of their own, or to join those folders (with the number of ranks that they are from)."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """A checkpoint, or a folder whose newest counts; several where each host has written into a folder of its own."""
    world_size: int
    """Ranks that the new files are for."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""


def merge(options: MergeOptions) -> None:
    reshard(ReshardOptions(options.folders, 1, options.out))


def reshard(options: ReshardOptions) -> None:
    """Raises ValueError where a file is missing or damaged, or the folders are not of one checkpoint."""
    if options.world_size < 1:
        raise ValueError(f"--world-size is {options.world_size}; expected at least 1")
    stored = CheckpointOnDisk(options.folders)
    size = options.world_size
    made_by = f"written anew for {size} rank(s), from {stored.world_size} ({stored.where})"
    manifest = {**stored.manifest, "world_size": size}
    with Output(options.out, manifest, stored.class_names, made_by) as output:
        output.rows(stored.rows)
        for name in ("backbone.safetensors", "optimizer.safetensors"):
            copy(stored, name, output)
        say(local_files(stored, output, size))
    print(f"{options.out}: {describe(manifest)}")


def copy(stored: CheckpointOnDisk, name: str, output: Output, rank: int = 0) -> None:
    path = stored.path(name)
    if path is None:
        raise ValueError(f"{stored.where} has no {name}")
    output.copy(path, rank)


def local_files(stored: CheckpointOnDisk, output: Output, size: int, lists: bool = True) -> Iterator[str]:
    """Writes what every rank has for itself, for `size` ranks; yields what is left out. lists: those of hard negatives,
    which are of use to the same ranks with the same classes only."""
    before = stored.world_size
    states = (local_tensors(stored, rank) for rank in range(before))
    if before == size:
        for rank, state in enumerate(states):
            if state:
                output.tensors(local_name(rank, size), state, rank)
    else:
        yield from _joined(states, output, size)
    for rank in range(before):
        path = stored.path(hard_negatives_name(rank, before))
        if path is None:
            continue
        if before != size or not lists:
            yield "lists of hard negatives are for the same ranks with the same classes: left out, they grow anew"
            output.manifest["hard_negatives"] = 0
            return
        output.copy(path, rank)


def _joined(states: Iterator[dict[str, Tensor]], output: Output, size: int) -> Iterator[str]:
    buffers = False

    def residuals() -> Iterator[dict[str, Tensor]]:
        nonlocal buffers
        for state in states:
            buffers |= any(name.startswith("buffer/") for name in state)
            owed = {name.removeprefix("exchange/"): t for name, t in state.items() if name.startswith("exchange/")}
            yield owed

    owed = merge_residuals(residuals(), size)
    if owed:
        for rank in range(size):
            output.tensors(local_name(rank, size), {f"exchange/{name}": t for name, t in owed.items()}, rank)
        yield "what gradient compression owes is joined: each rank has an equal part of it"
    if buffers:
        yield "the ranks' own running statistics are left out; the backbone holds those of all ranks together"


def local_tensors(stored: CheckpointOnDisk, rank: int) -> dict[str, Tensor]:
    """What a rank has for itself, in either format."""
    path = stored.path(local_name(rank, stored.world_size))
    if path is not None:
        return stored.load(path.name)
    name = _FORMAT_3_LOCAL.format(rank, stored.world_size)
    return {f"exchange/{key}": t for key, t in stored.load(name).items()} if stored.path(name) else {}
