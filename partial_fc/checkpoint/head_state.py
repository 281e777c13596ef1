"""The head in a checkpoint: its facts in the manifest, and how a head loads them (files: rows.py).

The manifest has the facts of each table of class centres in "tables", by its name ("": PartialFC's), and the head's own
state in "head". A rank's lists of hard negatives (the k nearest of its centres) load only on the same number of ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from partial_fc.checkpoint.rows import Rows, cut, mismatch
from partial_fc.head.protocol import Head, Table, is_table_name, scope

FORMAT = 5
_COUNTS = ("num_classes", "embedding_size", "sub_centres")


def facts_of(head: Head) -> dict[str, Any]:
    """Returns the head's facts for the manifest."""
    return {"tables": {name: _facts_of(table) for name, table in head.tables().items()}, "head": head.state()}


def _facts_of(table: Table) -> dict[str, Any]:
    return {
        "num_classes": table.num_classes,
        "embedding_size": table.embedding_size,
        "sub_centres": table.sub_centres,
        "hard_negatives": table.hard_negatives.k if table.hard_negatives else 0,
        "head": table.facts(),
    }


def tables_in(manifest: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Returns the manifest's facts of each table of class centres, by name; {} without a head. Raises ValueError."""
    tables, state = manifest.get("tables"), manifest.get("head")
    if not isinstance(tables, dict) or not all(map(is_table_name, tables)):
        raise ValueError(f"{where}: manifest.json says tables is {tables!r}; expected facts by the table's name")
    if not isinstance(state, dict):
        raise ValueError(f"{where}: manifest.json says head is {state!r}; expected the head's state by name")
    return tables


def check_same_head(manifest: dict[str, Any], head: Head, where: str) -> dict[str, dict[str, Any]]:
    """Returns the manifest's facts of each of the head's tables. Raises ValueError for another head."""
    stored, tables = tables_in(manifest, where), head.tables()
    if tables and not stored:
        raise ValueError(f"{where} has no class centres: its manifest.json is of another recipe, or damaged")
    if stored.keys() != tables.keys():
        raise ValueError(
            f"{where} has {_in_words(stored)}; this run's head has {_in_words(tables)}: centres would be lost or "
            "reset. Resume with the head that it was trained with"
        )
    for name, table in tables.items():
        now = _facts_of(table)
        for fact in _COUNTS:
            if stored[name][fact] != now[fact]:
                raise ValueError(
                    f"{where} has {fact} {stored[name][fact]}{f' in table {name}' if name else ''}; this run has "
                    f"{now[fact]}. (Other classes: `partial-fc checkpoint classes`)"
                )
    return stored


def _in_words(tables: Iterable[str]) -> str:
    names = sorted(tables)
    if not names:
        return "no class centres"
    return "class centres without a name" if names == [""] else f"the tables {', '.join(map(repr, names))}"


def load_table(stored: Mapping[str, Any], rows: Rows, table: Table, where: str) -> list[str]:
    """Loads facts and rows of its class range into a table. Returns notes for the user. Raises ValueError."""
    notes = []
    if stored["head"]["margin"].keys() != table.facts()["margin"].keys():
        notes.append(f"{where} was trained with another margin: the state of this one is reset")
    problem = mismatch(table.rows.columns, rows.columns, f"this run's {table.optimizer}", dtypes=False)
    if problem and rows.start < rows.stop:
        raise ValueError(f"{where} is of another head: {problem}")
    table.load_facts(stored["head"])
    for part in cut(rows, rows.start, rows.stop):
        table.rows.write(part.start, part.stop, part.class_N, part.rows)
    return notes


def hard_negatives_name(table: str, rank: int, world_size: int) -> str:
    return f"{scope(table)}-{rank:05d}-of-{world_size:05d}-hard-negatives.safetensors"


def load_hard_negatives(
    stored: Mapping[str, Any], world_size: int, read: Callable[[], dict[str, Tensor]], table: Table, where: str
) -> list[str]:
    """Loads this rank's lists of hard negatives, by `read`, if number of ranks and length match. Returns notes."""
    if table.hard_negatives is None:
        return []
    for then, now, what in (
        (stored["hard_negatives"], table.hard_negatives.k, "hard negatives a class"),
        (world_size, table.world.size, "ranks"),
    ):
        if then != now:
            table.hard_negatives.clear()
            return [f"the lists of hard negatives start empty: {where} has {then} {what}, this run {now}"]
    table.hard_negatives.load_state(read())
    return []
