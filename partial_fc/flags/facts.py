"""Facts about a flag, annotated at its field:

    lr: Annotated[float, In("[0, inf)"), Basic] = 0.1
    max_bad_records: Annotated[int, MayChange] = 100

By default a number is 0 or more, only --help-all shows the flag, and a resumed run with another value counts as a
different run.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

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
    """The range of a number, or of each in a tuple: an interval such as "(0, 1]", or the minimum."""

    interval: str | int


@dataclass(frozen=True)
class Refused:
    """A resumed run may not have another value. why: the reason. when(then, now): whether this applies."""

    why: str
    when: Callable[[Values, Values], bool] = lambda then, now: True


@dataclass(frozen=True)
class Kept:
    """A resumed run keeps this value of its checkpoint, whatever its flag says."""

    value: object


@dataclass(frozen=True)
class Makes:
    """The entry of the network's contract that this flag sets, if it has another name."""

    entry: str


class Shows(tuple[str, ...]):
    """Marks flags of a group as basic in one recipe: Shows(("nodes", "nr"))."""

    __slots__ = ()


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


# Limits beyond which a value would only exhaust the machine.
THREADS = "[1, 4096]"
PROCESSES = "[1, 65536]"
PIXELS = "[1, 16384]"
BATCH = "[1, 1048576]"
PERCENT = "[1, 100]"
CLASSES = f"[1, {1 << 48}]"
LABELS = "[1, 1000]"
PORT = "[1, 65535]"
ANY = "(-inf, inf)"
Workers = Annotated[int | Literal["auto"], In(THREADS), MayChange]
"""Decoding threads of a process: see comm.device.decoding_threads."""
_LARGEST_INT = 2**63 - 1


def check_numbers(group: Any) -> None:
    """Raises ValueError, with the flag, for a number of a dataclass that is NaN or outside its range.

    The field's `In` is the minimum, or an interval: "(0, 1]" is more than 0 and at most 1; without one, 0 or more.
    Infinity is allowed only if the interval ends in "inf]". None is skipped; of a tuple each number is checked.
    """
    said = facts(type(group))
    for field in dataclasses.fields(group):
        value, allowed = getattr(group, field.name), str((one(said.get(field.name, ()), In) or In(0)).interval)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                check_number(flag(field.name), number, allowed if "," in allowed else f"[{allowed}, inf)")


def check_number(name: str, number: float, interval: str) -> None:
    """Raises ValueError, with what is called so, for a number that is NaN or outside the interval."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    too_large = isinstance(number, int) and abs(number) > _LARGEST_INT
    if above and below and not too_large:
        return
    words = []
    if low > -math.inf:
        words.append(f"{'at least' if interval[0] == '[' else 'more than'} {low:,.15g}")
    if high < math.inf:
        words.append(f"{'at most' if interval[-1] == ']' else 'less than'} {high:,.15g}")
    elif too_large:
        words.append(f"at most {_LARGEST_INT}")
    elif math.isinf(number):
        words.append("finite")
    raise ValueError(f"{name} is {number}; expected {' and '.join(words) or 'a number'}")


def flag(name: str) -> str:
    """Returns the flag of a field."""
    return f"--{name.replace('_', '-')}"


def switch(name: str, value: bool) -> str:
    """Returns the flag that turns a field on or off."""
    return flag(name if value else f"no_{name}")
