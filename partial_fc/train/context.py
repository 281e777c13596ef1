"""The facts of a run, which everything around the loop reads."""

import time
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any

import torch

from partial_fc.comm import World
from partial_fc.comm.device import versions
from partial_fc.train.begin.run_folder import Folders


@dataclass
class Context:
    """Who runs what, and where. config: of the recipe, with the shared flag groups."""

    recipe: str
    config: Any
    world: World
    device: torch.device
    logger: Logger
    folders: Folders
    versions: dict[str, str] = field(default_factory=versions)
    began: float = field(default_factory=time.perf_counter)
    noted: set[str] = field(default_factory=set)  # what `note` has said

    @property
    def root(self) -> Path:
        return self.config.run.models_root

    @property
    def seconds(self) -> float:
        """Returns seconds since this process joined the world."""
        return time.perf_counter() - self.began

    @property
    def global_batch(self) -> int:
        """Returns the samples of one update, of all ranks."""
        return self.config.optim.batch_size * self.world.size * self.config.optim.accumulate

    def note(self, text: str) -> None:
        """Says it once: several heads may have the same flags."""
        if text not in self.noted:
            self.noted.add(text)
            self.logger.info(f"note: {text}")
