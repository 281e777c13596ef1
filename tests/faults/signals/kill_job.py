"""Recipe face, at the pace that a file says, and with a word in a folder of who is which rank; for real launchers:

    FAULT_FOLDER=DIR python train.py tests/faults/signals/kill_job.py --gpus 2 FLAGS

DIR/rank-R: process number and host of rank R. DIR/pace: seconds between two steps; none where the file is not there.
DIR/looked-R, DIR/held-R: when this rank looked whose the run's folder is, and when that was known to be its own, in
seconds of this machine's monotonic clock (of several folders, of the last one).
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partial_fc import comm


def main(arguments: list[str]) -> int:
    here, launch = Path(os.environ["FAULT_FOLDER"]), comm.detect()
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from partial_fc.checkpoint import lock
    from recipes import face

    if launch.backend != "single":
        acquire, train_here = lock.acquire, face.train_here

        def held(*words: Any) -> tuple[lock.FolderLock, str]:
            _write(here / f"looked-{launch.rank}", str(time.monotonic()))
            taken = acquire(*words)
            _write(here / f"held-{launch.rank}", str(time.monotonic()))
            return taken

        def paced(run: Any) -> int:
            from partial_fc.data.loader import Loader

            # Here, since what was started may be the keeper of what trains, and with it the rank may change.
            _write(here / f"rank-{run.world.rank}", f"{os.getpid()} {socket.gethostname()}")
            unpaced = Loader.__next__
            Loader.__next__ = _at_pace(unpaced, here / "pace")  # type: ignore[method-assign]
            try:
                return train_here(run)
            finally:
                Loader.__next__ = unpaced  # type: ignore[method-assign]

        lock.acquire, face.train_here = held, paced
    return face.main(arguments)


def _at_pace(next_batch: Callable[[Any], Any], pace: Path) -> Callable[[Any], Any]:
    def paced(loader: Any) -> Any:
        if pace.exists():
            time.sleep(float(pace.read_text()))
        return next_batch(loader)

    return paced


def _write(path: Path, text: str) -> None:
    """Whole, or not at all."""
    unfinished = path.with_name(f".{path.name}-{threading.get_native_id()}")
    unfinished.write_text(text)
    unfinished.rename(path)
