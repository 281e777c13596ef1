"""What the doctor found: for a person (the first places of each finding) and for a program (all of them, as JSON)."""

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


def _nowhere(number: int) -> Mapping[str, Any]:
    return {"number": number}


@dataclass(frozen=True)
class Finding:
    """One kind of thing that is so, with all places. A place is a number until somebody reads it: of 17 million there
    may be as many, and a Python object for each would not fit."""

    severity: Severity
    """error: training would fail, leave data out or learn something wrong. warning: look at it. info: good to know."""
    key: str
    """The same in every run: what a program looks for."""
    what: str
    """One sentence: what was found, what was expected, what to do."""
    count: int = 0
    """How many records, classes ... are concerned; 0 where it is about the whole."""
    places: NDArray[np.int64] | Sequence[int] = ()
    describe: Describe = _nowhere
    """What `describe(places[i])` says is the i-th place: names and values, {"key": 17, "class": 3}."""
    file: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """0: nothing but warnings; 1: an error."""
    return int(any(finding.severity == "error" for finding in findings))


def count(findings: Iterable[Finding], severity: Severity) -> int:
    return sum(finding.severity == severity for finding in findings)


def in_words(place: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" if name != "file" else str(value) for name, value in place.items())


def lines(finding: Finding, shown: int) -> list[str]:
    """For a terminal or a log: what it is, and the first places."""
    number = f"{finding.count:,} " if finding.count else ""
    out = [f"{finding.severity:8}{finding.key}: {number}{finding.what}"]
    first = [f"    {in_words(finding.describe(int(place)))}" for place in finding.places[:shown]]
    more = len(finding.places) - len(first)
    return [*out, *first, *([f"    ... and {more:,} more"] if more and first else [])]


def print_all(findings: Sequence[Finding], shown: int) -> None:
    """The worst first; by file, where there are several."""
    order = {"error": 0, "warning": 1, "info": 2}
    for file in dict.fromkeys(finding.file for finding in findings):
        print(f"\n{file}")
        for finding in sorted((f for f in findings if f.file == file), key=lambda f: order[f.severity]):
            print("\n".join(lines(finding, shown)))


def check_place(path: Path | None) -> None:
    """Raises ValueError where no file can be written: rather before all is looked at than after."""
    if path and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ValueError(f"{path}: cannot be written; expected a file name in a folder that is there")


def write_report(path: str | os.PathLike[str], summary: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """JSON: the summary's own keys, and "findings": severity, key, what, count, file, places (all of them).

    Written place by place, so that a million of them need no memory; it takes an older report's place at once.
    """
    with replacing(Path(path)) as partial, partial.open("w") as out:
        head = json.dumps(dict(summary), indent=1).rstrip("}").rstrip()
        out.write(f'{head}{"," if summary else ""}\n "findings": [')
        for number, finding in enumerate(findings):
            out.write(f"{',' if number else ''}\n  {_head(finding)}")
            for i, place in enumerate(finding.places):
                out.write(f"{',' if i else ''}\n    {json.dumps(dict(finding.describe(int(place))))}")
            out.write("]}")
        out.write("\n ]\n}\n")


def _head(finding: Finding) -> str:
    """The JSON object of a finding, open at its list of places."""
    values = {
        "severity": finding.severity,
        "key": finding.key,
        "what": finding.what,
        "count": finding.count,
        "file": finding.file,
    }
    return json.dumps(values)[:-1] + ', "places": ['
