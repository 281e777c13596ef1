"""The ranges of numbers among the flags, and their check."""

import dataclasses
import math
from typing import Any

from partial_fc.flags.facts import In, facts, one

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
