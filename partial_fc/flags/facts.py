"""Facts about a flag, which stand at its field:

    lr: Annotated[float, In("[0, inf)"), Basic] = 0.1
    num_workers: Annotated[int, In(THREADS), MayChange] = 2

A field that says nothing is a number from 0 on, which --help-all alone shows and whose change makes another run of a
resumed one.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, get_args, get_type_hints

Values = Mapping[str, Any]  # of all flags, by name
_T = TypeVar("_T")


class Mark(Enum):
    """Facts without a value."""

    BASIC = "--help shows it, not only --help-all"
    MAY_CHANGE = "a resumed run may have another value and still is the same run"
    COUNTS = "it may not, in a group whose flags may"


Basic, MayChange, Counts = Mark.BASIC, Mark.MAY_CHANGE, Mark.COUNTS


@dataclass(frozen=True)
class In:
    """The interval of a number, or of each in a tuple, as mathematics writes it, or the least that it may be: see
    `numbers.check_numbers`."""

    interval: str | int


@dataclass(frozen=True)
class Refused:
    """A resumed run may not have another value, and why; or not always: when(what was given then, now)."""

    why: str
    when: Callable[[Values, Values], bool] = lambda then, now: True


@dataclass(frozen=True)
class Makes:
    """What the network's contract calls it that is made by this flag, where it has another name."""

    entry: str


class Shows(tuple[str, ...]):
    """At a group of flags in a recipe: of these, too, --help is to tell there. Shows(("nodes", "nr"))."""

    __slots__ = ()


@dataclass(frozen=True)
class Before:
    """What runs did before there was this flag."""

    value: object


def may_change(group: type[_T]) -> type[_T]:
    """A group of flags that say how and where a run is trained, not what it learns: all of them may change."""
    group.all_may_change = True  # type: ignore[attr-defined]
    return group


def facts(flags: type) -> dict[str, tuple[object, ...]]:
    """The facts of each flag of a dataclass, those of its groups included, by name."""
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
    """The fact of this kind; None: there is none."""
    return next((fact for fact in said if isinstance(fact, kind)), None)


def basic(flags: type) -> tuple[str, ...]:
    """The flags that --help shows."""
    return tuple(name for name, said in facts(flags).items() if Basic in said)
