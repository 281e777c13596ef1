"""What becomes of a run whose processes get signals: what was seen, what is promised, the table in the docs.

    python -m tests.faults.signals.kill_table --write          puts what was seen into docs/reliability.md

kill_matrix.json has what was seen last (tests/faults/signals/kill_matrix.py), kill_promises.txt what is promised.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_HERE = Path(__file__).parent
RESULTS = _HERE / "kill_matrix.json"  # a line for each cell
DOCS = _HERE.parents[2] / "docs/reliability.md"
BEGIN, END = "<!-- begin: python -m tests.faults.signals.kill_table --write -->", "<!-- end -->"
COLUMNS = ("INT", "TERM", "HUP", "USR1", "KILL", "STOP")
OUTPUT = "output"  # instead of a process: where all of them print to
OUTPUT_COLUMNS = ("TEE", "PTY", "STALL", "FULL")
_OUTPUT_HEADS = ("`\\| tee log`, Ctrl-C", "terminal closed", "reader stalls, then TERM", "log's disk full")
_HEADS = ("Ctrl-C (INT)", "TERM", "HUP", "USR1", "KILL", "STOP, 30 s")


@dataclass(frozen=True)
class Cell:
    """What became of a run, one of whose processes got a signal.

    ends: "saved" (the last step is in a checkpoint), "ends" (the checkpoint before stands), "goes on", "left over"
    (processes run on that nobody leads). status: the command's, as a shell has it. left: processes ten seconds later.
    seconds: until none was left. lost: steps since the newest checkpoint.
    """

    launch: str
    target: str
    signal: str
    ends: str
    status: int | None
    left: int
    seconds: float | None
    lost: int | None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.launch, self.target, self.signal

    def __str__(self) -> str:
        return self.ends if self.status is None else f"{self.ends}, {self.status}"


def seen_last() -> list[Cell]:
    return [Cell(**json.loads(line)) for line in RESULTS.read_text().splitlines()]


def keep(cells: Iterable[Cell]) -> None:
    """In the order of the promises; others stay as they are."""
    seen = {cell.key: cell for cell in (*seen_last(), *cells)}
    ordered = [seen[key] for key in promised() if key in seen]
    RESULTS.write_text("".join(json.dumps(asdict(cell)) + "\n" for cell in ordered))


def _promises() -> dict[tuple[str, str, str], str]:
    found = {}
    for line in (_HERE / "kill_promises.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        launch, targets, *cells = (word.strip() for word in line.split("|"))
        for target in targets.split(" and "):
            columns = OUTPUT_COLUMNS if target == OUTPUT else COLUMNS
            found |= {(launch, target, name): words for name, words in zip(columns, cells, strict=True)}
    return found


def promised() -> dict[tuple[str, str, str], tuple[str, ...]]:
    """(launch, target, signal) -> what may become of the run; of several things timing decides."""
    return {key: tuple(words.split(" or ")) for key, words in _promises().items()}


def differences(cells: Iterable[Cell]) -> list[str]:
    """What was seen and is not promised."""
    may = promised()
    wrong = [
        f"{', '.join(cell.key)}: {cell}; promised: {' or '.join(may[cell.key])}"
        for cell in cells
        if str(cell) not in may[cell.key]
    ]
    left = [cell for cell in cells if cell.left and "left over" not in may[cell.key]]
    return wrong + [f"{', '.join(cell.key)}: {cell.left} processes are left" for cell in left]


def table(cells: Sequence[Cell]) -> str:
    """For docs/reliability.md; processes that fare alike share a row, and launchers whose processes do."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    outputs: dict[tuple[str, ...], list[str]] = {}
    seen = {cell.key: cell for cell in cells}
    for launcher in dict.fromkeys(cell.launch for cell in cells):
        alike: dict[tuple[str, ...], list[str]] = {}
        for target in dict.fromkeys(cell.target for cell in cells if cell.launch == launcher):
            columns = OUTPUT_COLUMNS if target == OUTPUT else COLUMNS
            fates = tuple(str(seen[launcher, target, name]) for name in columns)
            if target == OUTPUT:
                outputs.setdefault(fates, []).append(launcher)
            else:
                alike.setdefault(fates, []).append(target)
        for fates, targets in alike.items():
            rows.setdefault((", ".join(targets), fates), []).append(launcher)
    signals = [("; ".join(launchers), targets, *fates) for (targets, fates), launchers in rows.items()]
    prints = [("; ".join(launchers), *fates) for fates, launchers in outputs.items()]
    return f"{_rows(('', 'to', *_HEADS), signals)}\n{_rows(('', *_OUTPUT_HEADS), prints)}"


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |", 1) for line in lines)


def in_docs(text: str) -> str:
    """The table that is there between the two marks."""
    return text.partition(f"{BEGIN}\n")[2].partition(END)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.signals.kill_table", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help=f"into {DOCS.name}, not to the terminal")
    made = table(seen_last())
    if not parser.parse_args().write:
        print(made, end="")
        return
    text = DOCS.read_text()
    if BEGIN not in text:
        raise SystemExit(f"{DOCS} has no line {BEGIN}")
    before, _, rest = text.partition(f"{BEGIN}\n")
    DOCS.write_text(f"{before}{BEGIN}\n{made}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
