"""Recipe face, at the pace that a file says, and with a word in a folder of who is which rank; for real launchers:

    FAULT_FOLDER=DIR python train.py tests/faults/signals/kill_job.py --gpus 2 FLAGS

DIR/rank-R: process number and host of rank R. DIR/pace: seconds between two steps; none where the file is not there.
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
    from recipes.face import main as face

    if launch.backend != "single":
        train_here = face.train_here

        def paced(run: Any) -> int:
            from partial_fc.data.loader import Loader

            # Here, since what was started may be the supervisor of what trains.
            _write(here / f"rank-{run.world.rank}", f"{os.getpid()} {socket.gethostname()}")
            unpaced = Loader.__next__
            Loader.__next__ = _at_pace(unpaced, here / "pace")  # type: ignore[method-assign]
            try:
                return train_here(run)
            finally:
                Loader.__next__ = unpaced  # type: ignore[method-assign]

        face.train_here = paced
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
