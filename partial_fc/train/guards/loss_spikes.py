"""Loss spikes: a step whose loss stands far above those before it is told, with the records of its batch: the first
ones each, further ones when there are ten, a hundred, ... of them.

"Far" is measured with the median and the median absolute deviation of the last losses: a few spikes among them move
neither. (Iglewicz and Hoaglin, 1993, "How to Detect and Handle Outliers", with a wider limit than theirs: a loss is
not normally distributed, and a false alarm costs trust.)
"""

import json
import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from partial_fc.data import Batch
from partial_fc.files import warn_on_os_error
from partial_fc.train.job import Job

WINDOW = 200  # losses that are looked back at
LEAST = 50  # before there are so many, nothing is called far
FAR = 8.0  # standard deviations, of a normal distribution with the same median absolute deviation
SMALLEST_RISE = 0.25  # of the median: losses that hardly differ at all make a spread of nothing
# In nats. Below it there is nothing to look for: where the data is learned (median 0.0003) any image that is not makes
# a loss a thousand times as large, in an epoch after the other.
FLOOR = 1.0
TOLD = 3  # spikes that get a line of their own
WRITTEN = 100  # spikes whose records are written down


@dataclass(frozen=True)
class Spike:
    """loss: of the step; usual: the median of the losses before it; spread: in the unit of a standard deviation."""

    loss: float
    usual: float
    spread: float


class SpikeDetector:
    """The last losses of a run. count: its spikes so far; largest: (loss, step) of the highest."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._high = False
        self.count = 0
        self.largest = (0.0, 0)

    def add(self, loss: float) -> Spike | None:
        """Takes the next loss; says so where it is the first of a spike. The loss has to come down before another
        spike is told. A loss that is not finite is left out: it is somebody else's business."""
        if not math.isfinite(loss):
            return None
        spike = None
        if len(self._last) >= LEAST:
            usual = median(self._last)
            spread = 1.4826 * median(abs(other - usual) for other in self._last)
            is_high = loss - usual > max(FAR * spread, SMALLEST_RISE * abs(usual), FLOOR)
            if is_high and not self._high:
                spike = Spike(loss, usual, spread)
            self._high = is_high
        self._last.append(loss)
        return spike

    def note(self, job: Job, spike: Spike, batches: list[Batch], lr: float) -> None:
        """After update job.at.step, which is one: its records are written down (the first 100 times), and a line in the
        log says so (the first three times, and when there are 10, 100, 1,000 ...). Without a collective: a loss that is
        another one on another kind of processor must not make a rank wait."""
        self.count += 1
        self.largest = max(self.largest, (spike.loss, job.at.step))
        if self.count <= WRITTEN:
            write_records(job, spike, batches, lr)
        if self.count <= TOLD:
            job.logger.info(
                f"step {job.at.step}: the loss is {spike.loss:.4f}, far above the median {spike.usual:.4f} of the last "
                f"{WINDOW} (spread {spike.spread:.4f}); the keys of its records are in {job.models_root / 'spikes'}. "
                "Once is nothing; if it comes again with the same records look at those, if it grows lower --lr or set "
                "--clip" + ("; further spikes are only counted" if self.count == TOLD else "")
            )
        elif str(self.count).strip("0") == "1":
            job.logger.info(f"step {job.at.step}: {self._so_far()}")

    def sum_up(self, job: Job) -> None:
        """At the end of a run: how many there were, if that has not been said."""
        if self.count > TOLD and str(self.count).strip("0") != "1":
            job.logger.info(f"step {job.at.step}: {self._so_far()}; see {job.models_root / 'spikes'}")

    def _so_far(self) -> str:
        return f"{self.count:,} loss spikes so far, the largest of {self.largest[0]:.4f} in step {self.largest[1]}"


def write_records(job: Job, spike: Spike, batches: list[Batch], lr: float) -> None:
    """This rank's records of the batch, a row in models_root/spikes/rank-R.jsonl."""
    path = job.models_root / "spikes" / f"rank-{job.world.rank:05d}.jsonl"
    row = {
        "step": job.at.step,
        "loss": spike.loss,
        "median": spike.usual,
        "spread": spike.spread,
        "lr": lr,
        "position": job.at.position,
        "keys": [key for batch in batches for key in batch.key_B.tolist()],
        "labels": [label for batch in batches for label in batch.label_B.tolist()],
    }
    with warn_on_os_error(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
