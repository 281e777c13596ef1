"""Interfaces of a head, for the trainer, and of its tables of class centres, for checkpoints.

A head turns the model's output and the labels into a loss. PartialFC has one table, which is itself; CrossEntropy has
none; tests/recipes/two_heads.py is a head with two.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from partial_fc.comm import World
from partial_fc.head.rows import RowOptimizer
from partial_fc.head.rows.class_rows import ClassRows
from partial_fc.head.selection.hard_negatives import HardNegatives

_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)


class Table(Protocol):
    """Class centres that are sharded over the ranks, with their optimizer's state."""

    # A word that no other table of the head has; "" in a head with one table. Files and collectives have it.
    name: str
    world: World
    num_classes: int  # of all ranks
    embedding_size: int
    sub_centres: int
    optimizer: RowOptimizer
    hard_negatives: HardNegatives | None

    @property
    def rows(self) -> ClassRows:
        """The rows of this rank's classes."""

    @property
    def centres(self) -> Tensor:
        """This rank's centres after all steps so far, (classes, D) or (classes, sub_centres, D). Read only."""

    def facts(self) -> dict[str, Any]:
        """Returns the state besides the rows, as JSON, equal on every rank: num_steps, row_seed, margin, schedule."""

    def load_facts(self, facts: dict[str, Any], /) -> None:
        """Loads what `facts` returned. The rows are written afterwards."""

    def non_finite_classes(self) -> list[int]:
        """Returns some of this rank's classes whose centre has NaN or Inf, of those in the pending gradient."""


class Head(Protocol):
    """Computes the loss. All ranks call every method in the same order."""

    num_classes: int

    def __call__(self, out: Tensor, label_B: Tensor, /) -> Tensor:
        """The loss, a scalar that is equal on every rank: the mean over the global batch. Where batches have weights
        (--sample-weights) it is also called with row_weight_B=, float64 on the CPU."""

    def prepare(self, label_B: Tensor, /) -> None:
        """Takes the labels of all micro-batches of a step, before the first of several."""

    def finite(self) -> Tensor:
        """Returns whether this rank's pending gradient has neither NaN nor Inf: bool scalar."""

    def discard(self) -> None:
        """Discards the pending gradient: the step is skipped."""

    def gradient_square_sum(self) -> Tensor:
        """Returns the sum of squares of the pending gradient over all ranks: float64 scalar."""

    def scale_gradient(self, factor: float, /) -> None:
        """Multiplies the pending gradient."""

    def step(self, lr: float, /) -> None:
        """Updates the rows with the pending gradient."""

    @property
    def last_step(self) -> Any:
        """The argument of `row_losses` for the last forward pass."""

    def row_losses(self, last_step: Any, num_rows: int, /) -> Tensor:
        """Returns the losses of this rank's num_rows rows in the forward pass that set this `last_step`."""

    def tables(self) -> Mapping[str, Table]:
        """Returns the tables by name, in the same order on all ranks; a checkpoint stores their rows."""

    def state(self) -> dict[str, Any]:
        """Returns the state besides the tables, as JSON, equal on every rank."""

    def load(self, state: dict[str, Any], /) -> None:
        """Loads what `state` returned, after the tables."""


def scope(table: str) -> str:
    """Returns the prefix of a table's files and collectives: "head", or "head-NAME"."""
    return f"head-{table}" if table else "head"


def is_table_name(name: str) -> bool:
    return not name or _NAME.fullmatch(name) is not None


def check_head(head: Any) -> None:
    """Raises ValueError, which says what is missing, for a head that a run could not train or a checkpoint not hold."""
    kind = f"head {type(head).__name__}"
    _check_verbs(head, Head, kind)
    tables, state = head.tables(), head.state()
    for method, value in (("tables", tables), ("state", state)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{method}() of {kind} gives {value!r:.80}; expected a dict")
    for name, table in tables.items():
        _check_verbs(table, Table, f"table {name!r} of {kind}")
        if name != table.name or not is_table_name(name):
            raise ValueError(
                f"tables() of {kind} gives {name!r} for the table with name {table.name!r}; expected the table's own "
                "name, a letter and then letters, digits and _ (PartialFC(..., name=...)), or none"
            )
    for attribute, value in _held(head):
        if not _missing(value, Table) and not any(value is table for table in (head, *tables.values())):
            raise ValueError(
                f"{kind} has class centres in its attribute {attribute} that tables() does not give: no checkpoint "
                f"would hold them. Add them under a name of their own (here {value.name!r})"
            )
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state() of {kind} is not JSON: {error}") from error


def _check_verbs(value: object, protocol: type, what: str) -> None:
    missing = _missing(value, protocol)
    if missing:
        raise ValueError(
            f"{what} has no {', '.join(missing)}: it could not be trained and saved. "
            f"partial_fc.head.{protocol.__name__} says what each is for"
        )


def _missing(value: object, protocol: type) -> list[str]:
    named = {**protocol.__annotations__, **vars(protocol)}
    members = [name for name in named if not name.startswith("_") or name == "__call__"]
    # Not by hasattr(value, name): to read a table's centres creates those that are not there yet.
    has = {*dir(type(value)), *getattr(value, "__dict__", {})}
    return [name for name in members if name not in has]


def _held(head: object) -> Iterator[tuple[str, Any]]:
    """The attributes of a head, and what is in those that are lists, tuples or dicts."""
    for attribute, value in getattr(head, "__dict__", {}).items():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from ((attribute, each) for each in inside)
