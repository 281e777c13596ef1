"""The CSV file that Caffe2's resnet50_trainer and imagenet_trainer leave in the working directory: its name, header and
rows to the letter (ModelTrainerLog in caffe2/python/experiment_util.py).

    resnet50_gpu2_b64_L1000_lr0.10_v2_20170411_141617.log
    # Namespace(train_data='my_lmdb', ...)
    time_spent,cumulative_time_spent,input_count,cumulative_input_count,cumulative_batch_count,inputs_per_sec,accuracy,...
    3456.7,3456.7,0,0,23436,0.0,0.15625,0,0.1,4.8115196,-1

As in Caffe2, input counts are of the epoch's start (0 in the first row) and of this machine alone, and so is
inputs_per_sec; the batch count is zero-based; accuracy, loss and rate are those of the epoch's last update.
"""

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np

from partial_fc.files import replacing

_FIRST = (
    "time_spent",
    "cumulative_time_spent",
    "input_count",
    "cumulative_input_count",
    "cumulative_batch_count",
    "inputs_per_sec",
)


def first_start(path: Path, resumed: bool) -> datetime:
    """Returns when a run was first started, which names its log: now, and writes it to `path`; from `path` if resumed.
    Raises ValueError if that holds no time."""
    if resumed and path.exists():
        return datetime.fromisoformat(path.read_text(encoding="ascii").strip())
    now = datetime.now().replace(microsecond=0)
    path.write_text(f"{now.isoformat()}\n", encoding="ascii")
    return now


class Caffe2Log:
    """The log, with a row for each epoch. An existing file is continued: rows from `epoch` (from 0) on, which are
    trained again, are dropped, and cumulative values continue.

    arguments: its str() is the first line; Caffe2's is an argparse.Namespace. num_gpus: of the command line, also where
    --gpus names others. batch_size: of this machine, all GPUs. now: when the run was first started; a resumed run must
    give the same to find its file (`first_start`). model: imagenet_trainer's is "resnext" and the number of layers.
    shard: number of this machine; it stands in the name of all but the first, as machines may share the folder.
    """

    def __init__(
        self,
        folder: Path,
        arguments: object,
        num_gpus: int,
        batch_size: int,
        num_labels: int,
        lr: float,
        now: datetime,
        *,
        model: str = "resnet50",
        epoch: int = 0,
        shard: int = 0,
        clock: Callable[[], float] = time.time,
    ):
        name = f"{model}_gpu{num_gpus}_b{batch_size}_L{num_labels}_lr{lr:.2f}_v2_{now:%Y%m%d_%H%M%S}"
        name += f"_shard{shard}.log" if shard else ".log"
        self.path = folder / name
        self._batch_size, self._clock = batch_size, clock
        self._last_time = clock()
        self._start_time, self._last_count, self._has_header = self._last_time, 0, False
        if self.path.exists():
            self._go_on(epoch)
        else:
            self._append(f"# {arguments}")

    def add(
        self, epoch: int, num_updates: int, *, accuracy: float, loss: float, learning_rate: float, test_accuracy: float
    ) -> None:
        """Adds the row of an epoch, counted from 0. test_accuracy: -1 without test data."""
        now, count = self._clock(), epoch * num_updates * self._batch_size
        time_spent, input_count = now - self._last_time, count - self._last_count
        speed = input_count / time_spent if time_spent > 0 else 0.0
        # Caffe2 fetches these three as fp32 tensors, which print fewer digits.
        values: dict[str, object] = {
            "accuracy": np.float32(accuracy),
            "loss": np.float32(loss),
            "learning_rate": np.float32(learning_rate),
            "epoch": epoch,
            "test_accuracy": test_accuracy,
        }
        first = (time_spent, now - self._start_time, input_count, count, (epoch + 1) * num_updates - 1, speed)
        if not self._has_header:
            self._append(",".join([*_FIRST, *sorted(values)]))
        self._append(",".join(str(v) for v in [*first, *(values[name] for name in sorted(values))]))
        self._last_time, self._last_count, self._has_header = now, count, True

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _go_on(self, epoch: int) -> None:
        # A line without its end was cut by a full disk or a crash: its epoch was not saved either.
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
        kept, columns = lines[:2], lines[1].strip().split(",") if len(lines) > 1 else []
        for line in lines[2:]:
            row = dict(zip(columns, line.strip().split(","), strict=False))
            if int(row["epoch"]) >= epoch:
                break
            spent, count = float(row["cumulative_time_spent"]), int(row["cumulative_input_count"])
            self._start_time, self._last_count = self._last_time - spent, count
            kept.append(line)
        self._has_header = len(kept) > 2
        with replacing(self.path) as partial:
            partial.write_text("".join(kept if self._has_header else kept[:1]), encoding="utf-8")
