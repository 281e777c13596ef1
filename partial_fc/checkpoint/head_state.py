"""The head's part of a checkpoint: what the manifest says of it, and how a head gets it back (files: rows.py).

A head with one table without a name, as PartialFC is, has its facts among the manifest's own keys (format 4). Where
tables have names, or the head has a state of its own, they are "tables", by name, and "head" is that state (format 5).
Lists of hard negatives are a rank's own (the k nearest of its centres), so only the same number of ranks can use them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from partial_fc.checkpoint.rows import Rows, cut, mismatch
from partial_fc.head.protocol import Head, Table, is_table_name, scope

FORMAT, NAMED_FORMAT = 4, 5
_COUNTS = ("num_classes", "embedding_size", "sub_centres")
# What the manifest of a run with class centres says: numbers, from the least that they can be, and other values, of
# which only those of the table's own "head" must be there.
_LEAST = {"world_size": 1, **dict.fromkeys(_COUNTS, 1), "hard_negatives": 0, "head.num_steps": 0}
_KINDS = {"head.margin": dict, "head.schedule": dict, "head.row_seed": int}
_KINDS |= {"configuration": dict, "history": list, "best": dict, "versions": dict}
_OF_RUN = ("world_size", "configuration", "history", "best", "versions")


def facts_of(head: Head) -> dict[str, Any]:
    """What the manifest says of the head, and its format."""
    tables, state = {name: _facts_of(table) for name, table in head.tables().items()}, head.state()
    if not state and tables.keys() <= {""}:
        return {"format": FORMAT, **tables.get("", {})}
    return {"format": NAMED_FORMAT, "tables": tables, "head": state}


def _facts_of(table: Table) -> dict[str, Any]:
    return {
        "num_classes": table.num_classes,
        "embedding_size": table.embedding_size,
        "sub_centres": table.sub_centres,
        "hard_negatives": table.hard_negatives.k if table.hard_negatives else 0,
        "head": table.facts(),
    }


def tables_in(manifest: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """What the manifest says of each table of class centres, by name; {}: the head had none. Raises ValueError where
    that cannot be."""
    tables: Any = {"": manifest} if "num_classes" in manifest else {}
    if manifest.get("format") == NAMED_FORMAT:
        tables, state = manifest.get("tables"), manifest.get("head")
        if not isinstance(tables, dict) or not all(map(is_table_name, tables)):
            raise ValueError(f"{where}: manifest.json says tables is {tables!r}; expected facts by the table's name")
        if not isinstance(state, dict):
            raise ValueError(f"{where}: manifest.json says head is {state!r}; expected the head's state by name")
    for name, table in tables.items():
        _check_facts(manifest, table, f"{where}: manifest.json says{f' of table {name}' if name else ''}")
    return tables


def _check_facts(manifest: dict[str, Any], table: Any, begin: str) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{begin} {table!r}; expected its facts by name")
    said, head = {name: manifest[name] for name in _OF_RUN if name in manifest} | table, table.get("head")
    said |= {f"head.{name}": value for name, value in (head.items() if isinstance(head, dict) else ())}
    for name, least in _LEAST.items():
        value = said.get(name)
        if type(value) is not int or not least <= value < 1 << 62:
            raise ValueError(f"{begin} {name} is {value!r}; expected a whole number from {least}")
    for name, kind in _KINDS.items():
        value = said.get(name)
        if type(value) is not kind and (name in said or name.startswith("head.")):
            raise ValueError(f"{begin} {name} is {value!r}; expected {kind.__name__}")


def check_same_head(manifest: dict[str, Any], head: Head, where: str) -> dict[str, dict[str, Any]]:
    """What the manifest says of each of the head's tables. Raises ValueError where a checkpoint is of another head."""
    stored, tables = tables_in(manifest, where), head.tables()
    if tables and not stored:
        raise ValueError(f"{where} has no class centres: its manifest.json is of another recipe, or damaged")
    if stored.keys() != tables.keys():
        raise ValueError(
            f"{where} has {_in_words(stored)}; this run's head has {_in_words(tables)}: centres would be lost, or "
            "start anew. Go on with the head that it was trained with"
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


def state_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the head remembers besides its tables, of a manifest whose `tables_in` are right."""
    return manifest["head"] if manifest["format"] == NAMED_FORMAT else {}


def load(stored: Mapping[str, Any], rows: Rows, table: Table, where: str) -> list[str]:
    """Gives a table what the manifest says of it and the rows of its class range. Returns what a user should know.
    Raises ValueError where they are of another one."""
    notes = []
    if stored["head"]["margin"].keys() != table.facts()["margin"].keys():
        notes.append(f"{where} was trained with another margin: what this one remembers starts anew")
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
    """Gives a table this rank's lists of hard negatives, which `read` finds, where they are of as many ranks
    (world_size) and as long. Returns what a user should know."""
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
