"""Fails every operation of saves and tools, and looks at every state that a disk may be left in:

    python -m tests.faults.enumeration FOLDER [WORD]        WORD: of the names of sweeps; none: all

Prints how many of each there were, as JSON, a line for each sweep. Exit status 1: some broke a promise; it names them.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.operations import Disk, under_the_shim

if TYPE_CHECKING:
    from tests.faults.sweep import Sweep

_SHOWN = 10


def sweeps(disk: Disk, word: str) -> "Iterator[Sweep]":
    """One after the other, as each prepares the same folder."""
    from tests.faults.owner_sweep import OwnerSweep
    from tests.faults.save_scenarios import LAYOUTS, SAVES
    from tests.faults.save_sweep import SaveSweep
    from tests.faults.tool_sweep import TOOLS, ToolSweep

    makers: dict[str, Callable[[], Sweep]] = {"owner, one folder": lambda: OwnerSweep(disk)}
    makers |= {f"{tool.name}, one output": partial(ToolSweep, disk, tool) for tool in TOOLS}
    for layout, roots in LAYOUTS.items():
        makers |= {f"{what.name}, {layout}": partial(SaveSweep, disk, layout, roots, what) for what in SAVES}
    chosen = [make for name, make in makers.items() if word in name]
    if not chosen:
        raise SystemExit(f"no sweep is called {word!r}; there are {', '.join(makers)}")
    yield from (make() for make in chosen)


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    under_the_shim(folder)
    logging.getLogger("partial_fc").setLevel(logging.INFO)
    logging.getLogger("partial_fc").propagate = False
    num_wrong = 0
    for sweep in sweeps(Disk(folder / "disk"), " ".join(sys.argv[2:])):
        start = time.process_time()
        sweep.run()
        counts = {"sweep": sweep.name, **sweep.counts, "cpu_s": round(time.process_time() - start, 1)}
        print(json.dumps(counts), flush=True)
        num_wrong += len(sweep.wrong)
        for wrong in sweep.wrong[:_SHOWN]:
            print(f"WRONG {wrong}", flush=True)
        if len(sweep.wrong) > _SHOWN:
            print(f"... and {len(sweep.wrong) - _SHOWN} more", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
