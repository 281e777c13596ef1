"""Flags whose value changes during a run, as --sample-rate-schedule '0:0.3 60%:0.5 90%:1.0'."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from partial_fc.flags.facts import check_number

_SYNTAX = "expected STEP:VALUE or PERCENT%:VALUE with blanks between, from 0 on, as '0:0.3 60%:0.5 90%:1.0'"


class Entry(NamedTuple):
    """A value, and from where on it holds. word: STEP or PERCENT%, as typed."""

    word: str
    value: float

    @property
    def is_percent(self) -> bool:
        return self.word.endswith("%")

    @property
    def number(self) -> float:
        return float(self.word.removesuffix("%"))


@dataclass(frozen=True)
class ByStep:
    """The entries of a flag, in order. as_typed: the flag and its value, for messages."""

    as_typed: str
    entries: tuple[Entry, ...]

    def steps(self, total_steps: float, shift: float = 0.0) -> dict[int, float]:
        """Returns the values by step, counted from 0. total_steps: what percentages are of; shift: by so many steps
        they come earlier, as does the end of the run (optim/schedule.py, Continued). Where percentages of a short run
        are the same step the last one counts. Raises ValueError for entries beyond the end or out of order."""
        found: dict[int, float] = {}
        last = Entry("0", 0.0)
        for entry in self.entries:
            step = round(entry.number)
            if entry.is_percent:
                step = max(0, round(entry.number * total_steps / 100 - shift))
            elif step >= total_steps - shift:
                raise ValueError(
                    f"{self.as_typed}: step {step} is not in this run, which ends after {total_steps - shift:.0f}; "
                    "give an earlier step, or a percentage of the run"
                )
            if step < max(found, default=0):
                raise ValueError(
                    f"{self.as_typed}: {entry.word}, which is step {step} of this run, comes after {last.word}, step "
                    f"{max(found)}; expected ascending ones"
                )
            found[step], last = entry.value, entry
        return found

    def in_words(self, steps: dict[int, float]) -> str:
        """Returns what the flag means in a run with these steps, which count from 1 in its log."""
        return f"{self.as_typed}: " + ", ".join(f"{value:g} from step {step + 1} on" for step, value in steps.items())


def parse(flag: str, text: str, interval: str) -> ByStep:
    """Reads the value of a flag. interval: of the values, as of `In`. Raises ValueError for unknown syntax, values
    outside of it, and entries that are out of order whatever the length of the run."""
    as_typed = f"{flag} {text!r}"
    entries = []
    for word in text.split():
        where, _, value = word.partition(":")
        try:
            entry = Entry(where, float(value))
            is_known = entry.number >= 0 and (entry.number < 100 if entry.is_percent else where.isdecimal())
        except ValueError:
            is_known = False
        if not is_known:
            end = " (100% is the end of the run)" if where == "100%" else ""
            raise ValueError(f"{as_typed}: {word!r}{end}; {_SYNTAX}")
        check_number(f"{as_typed}: the value at {where}", entry.value, interval)
        entries.append(entry)
    if not entries or entries[0].number:
        raise ValueError(f"{as_typed} says nothing of the first step; {_SYNTAX}")
    for before, entry in pairwise(entries):
        if before.is_percent == entry.is_percent and not before.number < entry.number:
            raise ValueError(f"{as_typed}: {entry.word} comes after {before.word}; expected ascending ones")
    return ByStep(as_typed, tuple(entries))
