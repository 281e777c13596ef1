"""Times of a run's steps, observed from outside in its loss.csv."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Watch:
    """Looks at a loss.csv that is being written; `look` often."""

    path: Path
    step: int = 0
    """The last one that is there now."""
    furthest: int = 0
    backs: list[tuple[int, int]] = field(default_factory=list)
    """(step from, step to) of each time that the run has gone back."""
    first_step_at: float = float("nan")
    recoveries_s: list[float] = field(default_factory=list)
    """From each fault to the second step beyond those of before: the first one may have been as good as done."""
    _awaited: list[tuple[float, int]] = field(default_factory=list)
    """(time of a fault, step from which on it is made good)."""
    _seen: list[tuple[float, int]] = field(default_factory=list)
    """(time, step) when another number was seen."""
    _interrupted: bool = True  # between the last step and the next, something else was done

    def look(self) -> None:
        step = self._last()
        if step == self.step and not (self._interrupted and not self._seen):
            return
        if step < self.step:
            self.backs.append((self.step, step))
            self._interrupted = True
        if step > self.step:
            now = time.monotonic()
            if self._interrupted:
                # The start of its first step is unknown: durations count from here on.
                self._seen.append((float("nan"), self.step))
            self._seen.append((now, step))
            self._interrupted = False
        self.step = step
        if step > self.furthest:
            now = time.monotonic()
            self.first_step_at = now if not self.furthest else self.first_step_at
            self.furthest = step
            self.recoveries_s += [now - at for at, goal in self._awaited if goal <= step]
            self._awaited = [(at, goal) for at, goal in self._awaited if goal > step]

    def interrupted(self) -> None:
        """Marks a failure: time until the next step does not count as that step's."""
        self._interrupted = True

    def struck(self) -> None:
        """Marks a fault now."""
        self.interrupted()
        self._awaited.append((time.monotonic(), self.furthest + 2))

    def effective_s(self) -> float:
        """Returns the time of steps that count: of each step's last run, from the end of the step before. The first
        step after an interruption counts as the mean of the others."""
        duration: dict[int, float | None] = {}
        before_at, before = float("nan"), 0
        for at, step in self._seen:
            num = step - before
            for one in range(before + 1, step + 1):
                known = at == at and before_at == before_at and num > 0
                duration[one] = (at - before_at) / num if known else None
            before_at, before = at, step
        known_s = [seconds for seconds in duration.values() if seconds is not None]
        if not known_s:
            return 0.0
        return sum(known_s) + (len(duration) - len(known_s)) * sum(known_s) / len(known_s)

    def _last(self) -> int:
        """Returns the step of the last complete row."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 256))
                rows = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        except OSError:  # not there yet
            return 0
        number = rows.partition(b",")[0]
        return int(number) if number.isdigit() else 0
