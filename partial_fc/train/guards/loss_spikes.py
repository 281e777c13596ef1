"""Detection of loss spikes: a step whose loss is far above the previous ones is logged, with the records of its batch;
first each of them, then the tenth, the hundredth, ...

"Far" is measured with the median and the median absolute deviation of the last losses: which a few spikes do not move.
(Iglewicz and Hoaglin, 1993, "How to Detect and Handle Outliers", with a wider limit, as a loss is not normally
distributed and false alarms cost trust.)
"""

import json
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from partial_fc.accessories import spare
from partial_fc.data import Batch
from partial_fc.train.job import Job

WINDOW = 200  # losses to compare with
LEAST = 50  # the fewest losses to compare with
FAR = 8.0  # standard deviations, of a normal distribution with the same median absolute deviation
SMALLEST_RISE = 0.25  # of the median: nearly constant losses have no spread
# In nats. Smaller losses are no spikes: once the data is learned (median 0.0003), any unlearned image makes a loss a
# thousand times as large, in each epoch.
FLOOR = 1.0
TOLD = 3  # spikes with a line of their own
WRITTEN = 100  # spikes whose records are written


@dataclass(frozen=True)
class Spike:
    """A loss spike. loss: of the step; usual: the median of the losses before it; spread: as a standard deviation."""

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
        """Adds the next loss; returns the spike that it starts, if any; losses must fall first. Ignores NaN and Inf."""
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
        """Reports a spike after update job.at.step: writes its records (for the first 100 spikes), and a line in the
        log (for the first three, and the 10th, 100th, 1,000th ...). No collective: losses may differ between kinds of
        processors, and no rank may wait for the others."""
        self.count += 1
        self.largest = max(self.largest, (spike.loss, job.at.step))
        if self.count <= WRITTEN:
            path = job.models_root / "spikes" / f"rank-{job.world.rank:05d}.jsonl"
            spare(str(path), write_records, path, job, spike, batches, lr)
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
        """Logs the number of spikes at the end of a run, if it was not yet."""
        if self.count > TOLD and str(self.count).strip("0") != "1":
            job.logger.info(f"step {job.at.step}: {self._so_far()}; see {job.models_root / 'spikes'}")

    def _so_far(self) -> str:
        return f"{self.count:,} loss spikes so far, the largest of {self.largest[0]:.4f} in step {self.largest[1]}"


def write_records(path: Path, job: Job, spike: Spike, batches: list[Batch], lr: float) -> None:
    """Writes this rank's records of the batch, a row in models_root/spikes/rank-R.jsonl."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
