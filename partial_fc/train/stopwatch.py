"""Where a step's time goes."""

import time
from collections import defaultdict

import torch

from partial_fc.comm import World


class Stopwatch:
    """Splits time into named parts; what was spent waiting for other ranks goes to "communication".

    On a GPU the work runs behind the program's back, so parts are only told apart in steps that are marked with
    `exact`, which wait for the GPU after each part.
    """

    def __init__(self, world: World, device: torch.device):
        self._world = world
        self._on_gpu = device.type == "cuda"
        self.exact = not self._on_gpu
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.restart()

    def lap(self, part: str) -> None:
        """The time since the last lap belongs to `part`."""
        if not self.exact:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        waited = self._world.seconds_waiting - self._waiting
        self.seconds[part] += time.perf_counter() - self._started - waited
        self.seconds["communication"] += waited
        self.restart()

    def tell_apart(self, exact: bool) -> None:
        """exact: this step's parts are told apart even on a GPU."""
        self.exact = exact or not self._on_gpu

    def drain_shares(self) -> dict[str, float]:
        """Shares of the parts since the last call; they add up to 1."""
        total = sum(self.seconds.values()) or 1.0
        shares = {part: seconds / total for part, seconds in self.seconds.items()}
        self.seconds.clear()
        return shares

    def restart(self) -> None:
        """What was before belongs to no part."""
        self._started = time.perf_counter()
        self._waiting = self._world.seconds_waiting
