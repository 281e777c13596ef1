"""What is promised of a run whose processes get signals: docs/reliability.md, the table of "Signals"."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

_DOCS = Path(__file__).parents[3] / "docs/reliability.md"
_COLUMNS = ("INT", "TERM", "HUP", "USR1", "KILL")
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Cell:
    """What became of a run, one of whose processes got a signal.

    ends: "saved" (the last step is in a checkpoint), "ends" (the checkpoint before stands), "goes on", "left over"
    (processes run on that nobody leads). status: the command's, as a shell has it. left: processes ten seconds later.
    """

    launch: str
    target: str
    signal: str
    ends: str
    status: int | None
    left: int

    @property
    def key(self) -> Key:
        return self.launch, self.target, self.signal

    def __str__(self) -> str:
        return self.ends if self.status is None else f"{self.ends}, {self.status}"


def promised() -> dict[Key, tuple[str, ...]]:
    """(launch, target, signal) -> what may become of the run; of "ends or saved" timing decides."""
    found: dict[Key, tuple[str, ...]] = {}
    section = _DOCS.read_text().partition("\n## Signals\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    for launches, targets, *cells in (row for row in rows if len(row) == 7 and row[0] != "---"):
        for name, cell in zip(_COLUMNS, cells, strict=True):
            ends, comma, status = cell.partition(", ")
            may = tuple(f"{one}{comma}{status}" for one in ends.split(" or "))
            keys = product(launches.split("; "), targets.split(", "))
            found |= {(launch, target, name): may for launch, target in keys}
    # The page says it in a sentence: so it is with all of them.
    return found | {(launch, target, "STOP"): ("goes on",) for launch, target, _ in found}


def differences(cells: Iterable[Cell]) -> list[str]:
    """What was seen and is not promised."""
    may, wrong = promised(), []
    for cell in cells:
        if str(cell) not in may[cell.key]:
            wrong.append(f"{', '.join(cell.key)}: {cell}; promised: {' or '.join(may[cell.key])}")
        if cell.left and "left over" not in may[cell.key]:
            wrong.append(f"{', '.join(cell.key)}: {cell.left} processes are left")
    return wrong
