"""Findings of a check, and their report: for a person (the first places of each) and for a program (all, as JSON)."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import replacing

Severity = Literal["error", "warning", "info"]
Describe = Callable[[int], Mapping[str, Any]]


def _number_only(number: int) -> Mapping[str, Any]:
    return {"number": number}


@dataclass(frozen=True)
class Finding:
    """One kind of fault or remark, with all its places. A place is a number until somebody reads it: of 17 million
    there may be as many, and a Python object for each would not fit."""

    severity: Severity
    """error: training would fail, leave data out or learn something wrong. warning: look at it. info: good to know."""
    key: str
    """The same in every run: what a program looks for."""
    what: str
    """One sentence: what there is, what was expected, what to do."""
    count: int = 0
    """How many records, classes ... are concerned; 0 where it is about the whole."""
    places: NDArray[np.int64] | Sequence[int] = ()
    describe: Describe = _number_only
    """What `describe(places[i])` says is the i-th place: names and values, {"key": 17, "class": 3}."""
    file: str = ""


def findings_at(
    severity: Severity, key: str, what: str, which: NDArray[Any], describe: Describe, file: str = ""
) -> list[Finding]:
    """One finding about the places where `which` is set, or which it holds; none where there are none."""
    places = np.flatnonzero(which) if which.dtype == np.bool_ else which
    return [Finding(severity, key, what, len(places), places, describe, file)] if len(places) else []


def exit_status(findings: Iterable[Finding]) -> int:
    """0: nothing but warnings; 1: an error."""
    return int(any(finding.severity == "error" for finding in findings))


def count(findings: Iterable[Finding], severity: Severity) -> int:
    return sum(finding.severity == severity for finding in findings)


def counted(number: int, noun: str) -> str:
    """`1 image`, `2 images`, `3 classes`."""
    plural = noun if number == 1 else noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {plural}"


def place_text(place: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" if name != "file" else str(value) for name, value in place.items())


def text_lines(finding: Finding, shown: int) -> list[str]:
    """For a terminal or a log: what it is, and the first places."""
    number = f" ({finding.count:,})" if finding.count else ""
    first = [f"    {place_text(finding.describe(int(place)))}" for place in finding.places[:shown]]
    more = len(finding.places) - len(first)
    return [
        f"{finding.severity:8}{finding.key}{number}: {finding.what}",
        *first,
        *([f"    ... and {more:,} more"] if more and first else []),
    ]


def print_all(findings: Sequence[Finding], shown: int) -> None:
    """The worst first; by file, where there are several."""
    order = {"error": 0, "warning": 1, "info": 2}
    for file in dict.fromkeys(finding.file for finding in findings):
        print(f"\n{file}")
        for finding in sorted((f for f in findings if f.file == file), key=lambda f: order[f.severity]):
            print("\n".join(text_lines(finding, shown)))


def check_writable(path: Path | None) -> None:
    """Raises ValueError where no file can be written: rather before all is looked at than after."""
    if path and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ValueError(f"{path}: cannot be written; expected a file name in a folder that is there")


def write_report(path: str | os.PathLike[str], summary: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """JSON: the summary's own keys, and "findings": severity, key, what, count, file, places (all of them).

    Written place by place, so that a million of them need no memory; it takes an older report's place at once.
    """
    with replacing(Path(path)) as partial, partial.open("w") as out:
        # Each object is written without its closing brace, then what a million places would not fit into.
        out.write(f'{json.dumps(dict(summary))[:-1]}{", " if summary else ""}"findings": [')
        for number, finding in enumerate(findings):
            head = {name: getattr(finding, name) for name in ("severity", "key", "what", "count", "file")}
            out.write(f'{"," if number else ""}\n  {json.dumps(head)[:-1]}, "places": [')
            for i, place in enumerate(finding.places):
                out.write(f"{',' if i else ''}\n    {json.dumps(dict(finding.describe(int(place))))}")
            out.write("]}")
        out.write("\n ]\n}\n")
