"""The head's part of a checkpoint: rows of classes, in files that are written and read one after the other.

A file holds the made classes of a class range [start, stop), which is in its name, and at most PART_BYTES of them: each
tensor of `PartialFC.row_state`, as stored, and where some classes of the range were never made also "class", the
numbers of those that are there. A shard that fits into no memory can so be saved and loaded with one file's worth, and
rows never made take nothing. Whoever reads takes the files that its own range overlaps, whichever ranks wrote them.

Lists of hard negatives are a rank's own (the k nearest of its centres), so they are of use to the same number of ranks
only.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partial_fc.checkpoint.checksums import Sums
from partial_fc.head import PartialFC

PART_BYTES = 256 << 20
_RANGE = re.compile(r"-classes-(\d+)-(\d+)\.safetensors$")


@dataclass(frozen=True)
class Part:
    """Rows of classes [start, stop): what one file holds."""

    start: int
    stop: int
    rows: dict[str, Tensor]  # and "class", where some of the range were never made

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.rows.values())


def facts(head: PartialFC) -> dict[str, Any]:
    """What the manifest says of the head."""
    return {
        "num_classes": head.shard.num_classes,
        "embedding_size": head.embedding_size,
        "sub_centres": head.sub_centres,
        "world_size": head.world.size,
        "hard_negatives": head.hard_negatives.k if head.hard_negatives else 0,
        "head": head.facts(),
    }


def file_name(rank: int, world_size: int, start: int, stop: int) -> str:
    return f"{_prefix(rank, world_size)}-classes-{start:012d}-{stop:012d}.safetensors"


def hard_negatives_name(rank: int, world_size: int) -> str:
    return f"{_prefix(rank, world_size)}-hard-negatives.safetensors"


def _prefix(rank: int, world_size: int) -> str:
    return f"head-{rank:05d}-of-{world_size:05d}"


def class_bytes(head: PartialFC) -> int:
    """Of one class's rows."""
    return sum(t[:1].numel() * t.element_size() for t in head.row_state().values())


def parts(head: PartialFC, copy: bool) -> Iterator[Part]:
    """The made classes of this rank, file by file. copy: into memory of their own, on the CPU; else a part may be a
    view, and is to be done with before the head moves on."""
    rows, made_L = head.row_state(), head.made_classes()
    for begin, end in _ranges(made_L, max(1, PART_BYTES // max(1, class_bytes(head)))):
        at_M = made_L[begin:end].nonzero().squeeze(1) + begin
        if len(at_M) == end - begin:
            part = {name: tensor[begin:end] for name, tensor in rows.items()}
            if copy:
                part = {name: copied(tensor) for name, tensor in part.items()}
        else:
            part = {name: tensor.index_select(0, at_M).cpu() for name, tensor in rows.items()}
            part["class"] = at_M.cpu() + head.shard.start
        yield Part(head.shard.start + begin, head.shard.start + end, part)


def copied(t: Tensor) -> Tensor:
    """In memory of its own, on the CPU; copied once, as training stands still for it."""
    return t.clone() if t.device.type == "cpu" else t.cpu()


def _ranges(made_L: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges with at most `most` made classes each; none of no classes."""
    size = min(most, 4096)
    begin = held = 0
    for i, block in enumerate(made_L.cpu().split(size) if len(made_L) else ()):
        count = int(block.sum())
        if held + count > most:
            yield begin, i * size
            begin, held = i * size, 0
        held += count
    if len(made_L):
        yield begin, len(made_L)


def load(folder: Path, manifest: dict[str, Any], sums: Sums, head: PartialFC) -> list[str]:
    """Gives the head the rows of its class range. Returns what a user should know. Raises ValueError where the
    checkpoint is of another head, or a file is missing or damaged."""
    now = facts(head)
    if not _describes_a_head(manifest):
        raise ValueError(f"{folder / 'manifest.json'} is damaged, or of a run without class centres")
    for fact in ("num_classes", "embedding_size", "sub_centres"):
        if manifest[fact] != now[fact]:
            raise ValueError(f"{folder} has {fact} {manifest[fact]}; this run has {now[fact]}")
    files = _files_for(folder, manifest["world_size"], head)
    notes = []
    if manifest["head"]["margin"].keys() != head.margin_state.keys():
        notes.append(f"{folder} was trained with another margin: what this one remembers starts anew")
    head.load_facts(manifest["head"])
    for path, start, low, high in files:
        sums.check(path)
        _load_part(path, start, low, high, head)
    return notes + _load_hard_negatives(folder, manifest, sums, now, head)


def _describes_a_head(manifest: dict[str, Any]) -> bool:
    """Whether it has what `facts` says, each of its kind."""
    head = manifest.get("head")
    counts = [manifest.get(name) for name in ("num_classes", "embedding_size", "sub_centres", "hard_negatives")]
    if not isinstance(head, dict) or not all(type(head.get(name)) is dict for name in ("margin", "schedule")):
        return False
    return all(type(number) is int for number in (*counts, head.get("num_steps"), head.get("row_seed")))


def _files_for(folder: Path, world_size: int, head: PartialFC) -> list[tuple[Path, int, int, int]]:
    """(file, first class of it, the range [low, high) to take from it), which together are this rank's range."""
    found = []
    for path in folder.glob(f"head-*-of-{world_size:05d}-classes-*.safetensors"):
        matched = _RANGE.search(path.name)
        if matched:
            found.append((int(matched[1]), int(matched[2]), path))
    files, reached = [], head.shard.start
    for start, stop, path in sorted(found):
        low, high = max(reached, start), min(head.shard.stop, stop)
        if low < high and low == reached:
            files.append((path, start, low, high))
            reached = high
    if reached != head.shard.stop:
        raise ValueError(
            f"{folder}: no head file holds class {reached}; expected all of "
            f"[{head.shard.start}, {head.shard.stop}). Copy the head files of all hosts into this folder"
        )
    return files


def _load_part(path: Path, start: int, low: int, high: int, head: PartialFC) -> None:
    """Raises ValueError for a file that is damaged, or not of this head."""
    try:
        _take_rows(path, start, low, high, head)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or cut short: {error}") from error
    except (
        ValueError,
        IndexError,
        RuntimeError,
    ) as error:  # other names, shapes or dtypes than the head's rows have
        raise ValueError(f"{path} is not of this head: {error}") from error


def _take_rows(path: Path, start: int, low: int, high: int, head: PartialFC) -> None:
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        begin, end, class_M = low - start, high - start, torch.arange(low, high)
        if "class" in names:
            class_N = file.get_tensor("class")
            begin, end = torch.searchsorted(class_N, torch.tensor((low, high))).tolist()
            class_M = class_N[begin:end]
        rows = {name: file.get_slice(name)[begin:end] for name in names - {"class"}}
        head.load_classes(low, high, class_M, rows)


def _load_hard_negatives(
    folder: Path, manifest: dict[str, Any], sums: Sums, now: dict[str, Any], head: PartialFC
) -> list[str]:
    if head.hard_negatives is None:
        return []
    for fact, what in (("hard_negatives", "hard negatives a class"), ("world_size", "ranks")):
        if manifest[fact] != now[fact]:
            head.hard_negatives.clear()
            return [
                f"the lists of hard negatives start empty: {folder} has {manifest[fact]} {what}, this run {now[fact]}"
            ]
    world = head.world
    head.hard_negatives.load_state(sums.load(folder / hard_negatives_name(world.rank, world.size)))
    return []
