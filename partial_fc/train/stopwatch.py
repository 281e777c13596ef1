"""The time of a step, by part."""

import time
from collections import defaultdict

import torch

from partial_fc.comm import World


class Stopwatch:
    """Splits time into named parts; time spent waiting for other ranks goes to "communication".

    GPU work is asynchronous, so parts are only separated in steps marked `exact`, which wait after each part.
    """

    def __init__(self, world: World, device: torch.device):
        self._world = world
        self._on_gpu = device.type == "cuda"
        self.exact = not self._on_gpu
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.restart()

    def lap(self, part: str) -> None:
        """Adds the time since the last lap to `part`."""
        if not self.exact:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        waited = self._world.seconds_waiting - self._waiting
        self.seconds[part] += time.perf_counter() - self._started - waited
        self.seconds["communication"] += waited
        self.restart()

    def tell_apart(self, exact: bool) -> None:
        """exact: separates this step's parts even on a GPU."""
        self.exact = exact or not self._on_gpu

    def drain_shares(self) -> dict[str, float]:
        """Returns the shares of the parts since the last call; they add up to 1."""
        total = sum(self.seconds.values()) or 1.0
        shares = {part: seconds / total for part, seconds in self.seconds.items()}
        self.seconds.clear()
        return shares

    def restart(self) -> None:
        """Discards the time since the last lap."""
        self._started = time.perf_counter()
        self._waiting = self._world.seconds_waiting
