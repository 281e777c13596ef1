"""Fails every operation of saves, and looks at every state that a disk may be left in:

    python -m tests.faults.disk.enumeration FOLDER [WORDS ...]   only sweeps whose names have one of the WORDS

Prints how many of each there were, as JSON, a line for each sweep; two sweeps run at once for each core. Exit
status 1: some broke a promise; it names them. FOLDER: nothing of it is ever synced, so best one in memory (/dev/shm).
"""

import gc
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.disk.operations import Disk, under_the_shim

if TYPE_CHECKING:
    from tests.faults.disk.sweep import Sweep

_SHOWN = 10


def sweeps() -> "dict[str, Callable[[Disk], Sweep]]":
    """By name, those first that take longest: of the processes that share them none is left alone with one."""
    from tests.faults.disk.save_scenarios import LAYOUTS, SAVES
    from tests.faults.disk.sweep import Sweep

    return {
        f"{what.name}, {layout}": partial(Sweep, layout=layout, roots=roots, what=what)
        for what in reversed(SAVES)
        for layout, roots in reversed(LAYOUTS.items())
    }


def _run(folder: Path, name: str) -> tuple[dict[str, object], list[str]]:
    """(how many there were of each, what was wrong). In a process that does nothing else meanwhile."""
    start = time.process_time()
    logging.getLogger("partial_fc").setLevel(logging.INFO)
    sweep = sweeps()[name](Disk(folder / name.replace(" ", "-")))
    sweep.run()
    return {"sweep": name, **sweep.counts, "cpu_s": round(time.process_time() - start, 1)}, sweep.wrong


def main() -> int:
    folder, words = Path(sys.argv[1]), sys.argv[2:] or [""]
    folder.mkdir(parents=True, exist_ok=True)
    under_the_shim(folder)
    names = [name for name in sweeps() if any(word in name for word in words)]
    if not names:
        raise SystemExit(f"no sweep is called {words}; there are {', '.join(sweeps())}")
    gc.freeze()  # what is loaded now is shared by all processes
    num_wrong = 0
    # Half of their time they wait: for records that nobody renews, and for processes that they end.
    with ProcessPoolExecutor(2 * len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        for counts, wrong in pool.map(partial(_run, folder), names):
            print(json.dumps(counts), flush=True)
            num_wrong += len(wrong)
            for line in wrong[:_SHOWN]:
                print(f"WRONG {line}", flush=True)
            if len(wrong) > _SHOWN:
                print(f"... and {len(wrong) - _SHOWN} more", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
