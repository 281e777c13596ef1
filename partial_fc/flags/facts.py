"""Facts about a flag, annotated at its field:

    lr: Annotated[float, In("[0, inf)"), Basic] = 0.1
    num_workers: Annotated[int, In(THREADS), MayChange] = 2

By default a number is 0 or more, only --help-all shows the flag, and a resumed run with another value counts as a
different run.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, get_args, get_type_hints

Values = Mapping[str, Any]  # of all flags, by name
_T = TypeVar("_T")


class Mark(Enum):
    """A fact without a value."""

    BASIC = "--help shows it, not only --help-all"
    MAY_CHANGE = "a resumed run may have another value and still is the same run"
    COUNTS = "it may not, in a group whose flags may"


Basic, MayChange, Counts = Mark.BASIC, Mark.MAY_CHANGE, Mark.COUNTS


@dataclass(frozen=True)
class In:
    """The range of a number, or of each number in a tuple: an interval such as "(0, 1]", or the minimum. See
    `numbers.check_numbers`."""

    interval: str | int


@dataclass(frozen=True)
class Refused:
    """A resumed run may not have another value. why: the reason. when(values then, values now): tells whether this
    applies."""

    why: str
    when: Callable[[Values, Values], bool] = lambda then, now: True


@dataclass(frozen=True)
class Makes:
    """The entry of the network's contract that this flag sets, if it has another name."""

    entry: str


class Shows(tuple[str, ...]):
    """Marks flags of a group as basic in one recipe: Shows(("nodes", "nr"))."""

    __slots__ = ()


@dataclass(frozen=True)
class Before:
    """The value that runs had before this flag existed."""

    value: object


def may_change(group: type[_T]) -> type[_T]:
    """Marks a group whose flags may all change on resume: they affect how and where a run trains, not its result."""
    group.all_may_change = True  # type: ignore[attr-defined]
    return group


def facts(flags: type) -> dict[str, tuple[object, ...]]:
    """Returns the facts of each flag of a dataclass, those of its groups included, by name."""
    found: dict[str, tuple[object, ...]] = {}
    hints = get_type_hints(flags, include_extras=True)
    for field in dataclasses.fields(flags):
        kind = hints[field.name]
        said = tuple(getattr(kind, "__metadata__", ()))
        bare = get_args(kind)[0] if said else kind
        if dataclasses.is_dataclass(bare):
            assert isinstance(bare, type)
            group, shown = facts(bare), one(said, Shows) or ()
            assert group.keys() >= set(shown), shown
            found |= group | {name: (*group[name], Basic) for name in shown}
            continue
        if getattr(flags, "all_may_change", False) and Counts not in said:
            said = (*said, MayChange)
        found[field.name] = said
    return found


def one(said: tuple[object, ...], kind: type[_T]) -> _T | None:
    """Returns the fact of this kind, or None."""
    return next((fact for fact in said if isinstance(fact, kind)), None)


def basic(flags: type) -> tuple[str, ...]:
    """Returns the flags that --help shows."""
    return tuple(name for name, said in facts(flags).items() if Basic in said)
