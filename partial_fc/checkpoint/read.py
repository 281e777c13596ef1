"""Reads checkpoints, by whatever number of ranks they were written."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from partial_fc.checkpoint import head_rows
from partial_fc.checkpoint.write import FORMAT, MARKER, complete
from partial_fc.head import PartialFC


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

    def load_head(self, head: PartialFC) -> list[str]:
        """Gives the head the rows of its class range, from as many files as they lie in, of which one at a time is in
        memory. Returns what the user should know: what could not be taken over."""
        return head_rows.load(self.folder, self.manifest, head)
