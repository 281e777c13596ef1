"""Reads checkpoints, by whatever number of ranks they were written."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

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

    def load_head(self, head: PartialFC) -> None:
        """Gives the head the rows of its class range, from as many files as they lie in."""
        for fact, mine in (("num_classes", head.shard.num_classes), ("embedding_size", head.embedding_size)):
            if self.manifest[fact] != mine:
                raise ValueError(f"{self.folder} has {fact} {self.manifest[fact]}; this run has {mine}")
        parts: dict[str, list[Tensor]] = {}
        reached = head.shard.start
        for path in sorted(self.folder.glob("head-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                start, stop = (int(file.metadata()[key]) for key in ("start", "stop"))
                low, high = max(reached, start), min(head.shard.stop, stop)
                if low >= high:
                    continue
                if low != reached:
                    break
                for name in file.keys():  # noqa: SIM118 - not a dict
                    parts.setdefault(name, []).append(file.get_slice(name)[low - start : high - start])
                reached = high
        if reached != head.shard.stop:
            raise ValueError(
                f"{self.folder}: no head file holds class {reached}; expected all of "
                f"[{head.shard.start}, {head.shard.stop}). Copy the head files of all hosts into this folder"
            )
        rows = {name: torch.cat(tensors) for name, tensors in parts.items()}
        head.load_row_state(rows or {k: v[:0] for k, v in head.row_state().items()}, self.manifest["head"])
