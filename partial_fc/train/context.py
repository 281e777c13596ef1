"""What a run is, in one world: its configuration, its place among the others, its log."""

import time
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any

import torch

from partial_fc.checkpoint.peer import ProcessState
from partial_fc.comm import World
from partial_fc.comm.device import versions


@dataclass
class RunContext:
    """config: of the recipe, with the shared flag groups. memory: what its process keeps from world to world."""

    recipe: str
    config: Any
    world: World
    device: torch.device
    logger: Logger
    memory: ProcessState
    versions: dict[str, str] = field(default_factory=versions)
    # Whether no earlier world of this run has trained on the data: else no second look may end or hold up the run.
    data_is_new: bool = True
    # Whether checkpoints and weights are written; whether also where the images are made up.
    keeps: bool = True
    keeps_made_up: bool = True
    # What is another one than in the run that this one goes on with, by flag.
    differences: list[str] = field(default_factory=list)
    # What --epochs and --max-steps were in that run.
    length_before: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    @property
    def root(self) -> Path:
        return self.config.run.models_root

    @property
    def seconds(self) -> float:
        """Since this process joined the world."""
        return time.perf_counter() - self.began

    @property
    def global_batch(self) -> int:
        """Samples of one update, of all ranks."""
        return self.config.optim.batch_size * self.world.size * self.config.optim.accumulate

    def note(self, text: str) -> None:
        self.logger.info(f"note: {text}")
