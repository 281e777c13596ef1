"""The head's part of a checkpoint: what the manifest says of it, and how a head gets its rows back (files: rows.py).

Lists of hard negatives are a rank's own (the k nearest of its centres), so they are of use to the same number of ranks
only. A head without rows of its own (`head.rows` is None) has no part of a checkpoint.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from partial_fc.checkpoint.rows import Rows, cut, mismatch
from partial_fc.head import PartialFC
from partial_fc.head.class_rows import ClassRows

_COUNTS = ("num_classes", "embedding_size", "sub_centres")
# What the manifest of a run with class centres says: numbers, from the least that they can be, and other values, of
# which only those of the head must be there.
_LEAST = {"world_size": 1, **dict.fromkeys(_COUNTS, 1), "hard_negatives": 0, "head.num_steps": 0}
_KINDS = {"head.margin": dict, "head.schedule": dict, "head.row_seed": int}
_KINDS |= {"configuration": dict, "history": list, "best": dict, "versions": dict}


class Head(Protocol):
    """What makes the loss: a PartialFC, or one whose rows are None."""

    @property
    def rows(self) -> ClassRows | None: ...


def facts_of(head: Head) -> dict[str, Any]:
    """What the manifest says of the head."""
    if head.rows is None:
        return {}
    assert isinstance(head, PartialFC)
    return {
        "num_classes": head.shard.num_classes,
        "embedding_size": head.embedding_size,
        "sub_centres": head.sub_centres,
        "hard_negatives": head.hard_negatives.k if head.hard_negatives else 0,
        "head": head.facts(),
    }


def has_head(manifest: dict[str, Any], where: str) -> bool:
    """Whether the manifest is of a run with class centres. Raises ValueError where what it says of them cannot be."""
    if "num_classes" not in manifest:
        return False
    head = manifest.get("head")
    said = manifest | {f"head.{name}": value for name, value in (head.items() if isinstance(head, dict) else ())}
    for name, least in _LEAST.items():
        value = said.get(name)
        if type(value) is not int or not least <= value < 1 << 62:
            raise ValueError(f"{where}: manifest.json says {name} is {value!r}; expected a whole number from {least}")
    for name, kind in _KINDS.items():
        value = said.get(name)
        if type(value) is not kind and (name in said or name.startswith("head.")):
            raise ValueError(f"{where}: manifest.json says {name} is {value!r}; expected {kind.__name__}")
    return True


def check_same_head(manifest: dict[str, Any], head: PartialFC, where: str) -> None:
    """Raises ValueError where a checkpoint is of another head."""
    if not has_head(manifest, where):
        raise ValueError(f"{where} has no class centres: its manifest.json is of another recipe, or damaged")
    now = facts_of(head)
    for fact in _COUNTS:
        if manifest[fact] != now[fact]:
            raise ValueError(
                f"{where} has {fact} {manifest[fact]}; this run has {now[fact]}. (Other classes: `partial-fc "
                "checkpoint classes`)"
            )


def load(manifest: dict[str, Any], rows: Rows, head: PartialFC, where: str) -> list[str]:
    """Gives the head what the manifest says and the rows of its class range. Returns what a user should know. Raises
    ValueError where they are of another head."""
    notes = []
    if manifest["head"]["margin"].keys() != head.margin_state.keys():
        notes.append(f"{where} was trained with another margin: what this one remembers starts anew")
    problem = mismatch(head.rows.columns, rows.columns, f"this run's {head.optimizer}", dtypes=False)
    if problem and rows.start < rows.stop:
        raise ValueError(f"{where} is of another head: {problem}")
    head.load_facts(manifest["head"])
    for part in cut(rows, rows.start, rows.stop):
        head.rows.write(part.start, part.stop, part.class_N, part.rows)
    return notes


def hard_negatives_name(rank: int, world_size: int) -> str:
    return f"head-{rank:05d}-of-{world_size:05d}-hard-negatives.safetensors"


def load_hard_negatives(
    manifest: dict[str, Any], read: Callable[[], dict[str, Tensor]], head: PartialFC, where: str
) -> list[str]:
    """Gives the head this rank's lists of hard negatives, which `read` finds, where they are of as many ranks and as
    long. Returns what a user should know."""
    if head.hard_negatives is None:
        return []
    for then, now, what in (
        (manifest["hard_negatives"], head.hard_negatives.k, "hard negatives a class"),
        (manifest["world_size"], head.world.size, "ranks"),
    ):
        if then != now:
            head.hard_negatives.clear()
            return [f"the lists of hard negatives start empty: {where} has {then} {what}, this run {now}"]
    head.hard_negatives.load_state(read())
    return []
