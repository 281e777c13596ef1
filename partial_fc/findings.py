"""Findings of a check, and their report: for people (the first places of each) and for programs (all, as JSON)."""

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


@dataclass(frozen=True)
class Finding:
    """A fault or remark, with all its places. A place is a number until it is printed: there may be 17 million."""

    severity: Severity
    """error: training would fail, leave data out or learn something wrong. warning: look at it. info: good to know."""
    key: str
    """Stable over runs, for programs."""
    what: str
    """One sentence: the fact, what was expected, the remedy."""
    count: int = 0
    """The number of records, classes ... concerned; 0 if it is about the whole."""
    places: NDArray[np.int64] | Sequence[int] = ()
    describe: Describe = lambda number: {"number": number}
    """`describe(places[i])` names the i-th place: names and values, {"key": 17, "class": 3}."""
    file: str = ""


def findings_at(
    severity: Severity, key: str, what: str, which: NDArray[Any], describe: Describe, file: str = ""
) -> list[Finding]:
    """Returns one finding about the places at which `which` is set, or which it contains; [] if there are none."""
    places = np.flatnonzero(which) if which.dtype == np.bool_ else which
    return [Finding(severity, key, what, len(places), places, describe, file)] if len(places) else []


def count(findings: Iterable[Finding], severity: Severity) -> int:
    return sum(finding.severity == severity for finding in findings)


def counted(number: int, noun: str) -> str:
    """`1 image`, `2 images`, `3 classes`."""
    plural = noun if number == 1 else noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {plural}"


def text_lines(finding: Finding, shown: int) -> list[str]:
    """Returns lines for a terminal or a log: the finding, and its first places."""
    number = f" ({finding.count:,})" if finding.count else ""
    first = []
    for place in finding.places[:shown]:
        named = finding.describe(int(place)).items()
        line = ", ".join(f"{name} {value}" if name != "file" else str(value) for name, value in named)
        line, same, other = line.partition(", same as ")
        first.append(f"    {line}{same and ', equals '}{other.removeprefix('file ').replace(', same as ', ', ')}")
    more = len(finding.places) - len(first)
    return [
        f"{finding.severity:8}{finding.key}{number}: {finding.what}",
        *first,
        *([f"    ... and {more:,} more"] if more and first else []),
    ]


def print_all(findings: Sequence[Finding], shown: int) -> None:
    """Prints the findings, the worst first; by file, if there are several."""
    order = {"error": 0, "warning": 1, "info": 2}
    for file in dict.fromkeys(finding.file for finding in findings):
        print(f"\n{file}")
        for finding in sorted((f for f in findings if f.file == file), key=lambda f: order[f.severity]):
            print("\n".join(text_lines(finding, shown)))


def check_writable(path: Path | None) -> None:
    """Raises ValueError if the file cannot be written: before the check rather than after."""
    if path and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ValueError(f"{path}: cannot be written; expected a file name in a folder that is there")


def write_report(path: str | os.PathLike[str], summary: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """Writes JSON: the summary's own keys, and "findings": severity, key, what, count, file, places (all of them).

    It is written place by place, to save memory, and replaces an older report atomically.
    """
    with replacing(Path(path)) as partial, partial.open("w") as out:
        # Each object is written without its closing brace, then the places one by one.
        out.write(f'{json.dumps(dict(summary))[:-1]}{", " if summary else ""}"findings": [')
        for number, finding in enumerate(findings):
            head = {name: getattr(finding, name) for name in ("severity", "key", "what", "count", "file")}
            out.write(f'{"," if number else ""}\n  {json.dumps(head)[:-1]}, "places": [')
            for i, place in enumerate(finding.places):
                out.write(f"{',' if i else ''}\n    {json.dumps(dict(finding.describe(int(place))))}")
            out.write("]}")
        out.write("\n ]\n}\n")
