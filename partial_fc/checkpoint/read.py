"""Reads checkpoints, by whatever number of ranks they were written."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from partial_fc.checkpoint import head_rows
from partial_fc.checkpoint.write import FORMAT, MARKER, complete, exchange_name
from partial_fc.comm import World
from partial_fc.head import PartialFC
from partial_fc.optim.exchange import joined


def newest(root: Path) -> Path | None:
    """The complete checkpoint with the most steps below root."""
    return max(complete(root), default=None)


class Checkpoint:
    """One complete checkpoint folder. Raises ValueError for one that is not."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / MARKER).exists():
            raise ValueError(f"{folder} is no complete checkpoint: it has no file {MARKER}")
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        if self.manifest["format"] != FORMAT:
            raise ValueError(f"{folder} has format {self.manifest['format']}; this version reads {FORMAT}")

    @property
    def step(self) -> int:
        return self.manifest["step"]

    def backbone(self) -> dict[str, Tensor]:
        return load_file(self.folder / "backbone.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        return load_file(self.folder / "optimizer.safetensors")

    def exchange(self, world: World) -> dict[str, Tensor]:
        """What this rank's gradient compression remembers. On another number of ranks each takes an equal part of what
        all of them owed. Empty: the run had none."""
        size = self.manifest["world_size"]
        paths = [self.folder / exchange_name(rank, size) for rank in range(size)]
        there = [path for path in paths if path.exists()]
        if not there:
            return {}
        if len(there) < size:
            missing = next(path for path in paths if not path.exists())
            raise ValueError(f"{missing} is missing. Copy the exchange files of all hosts into this folder")
        if size == world.size:
            return load_file(paths[world.rank])
        return joined((load_file(path) for path in paths), world.size)

    def load_head(self, head: PartialFC) -> list[str]:
        """Gives the head the rows of its class range, from as many files as they lie in, of which one at a time is in
        memory. Returns what the user should know: what could not be taken over."""
        return head_rows.load(self.folder, self.manifest, head)
