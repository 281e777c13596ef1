"""Writes checkpoints and the final model."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from partial_fc.comm import World
from partial_fc.head import PartialFC

FORMAT = 2
MARKER = "COMPLETE"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def save(
    root: Path,
    step: int,
    backbone: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    head: PartialFC,
    facts: dict[str, Any],
    world: World,
    keep: int,
) -> Path:
    """All ranks write the state after `step` updates to root/step-N, and remove all but the newest `keep`.

    facts: what else is to be found again, as JSON (position, best scores, configuration). A collective.
    """
    folder = root / folder_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    if world.rank == 0:
        (folder / MARKER).unlink(missing_ok=True)  # of an earlier try at this step
        save_tensors(backbone, folder / "backbone.safetensors")
        save_tensors(optimizer, folder / "optimizer.safetensors")
        manifest = {
            "format": FORMAT,
            "step": step,
            "num_classes": head.shard.num_classes,
            "embedding_size": head.embedding_size,
            "head": head.facts(),
            "world_size": world.size,
            **facts,
        }
        write_json(manifest, folder / "manifest.json")
    save_tensors(
        head.row_state(),
        folder / f"head-{world.rank:05d}-of-{world.size:05d}.safetensors",
        {"start": str(head.shard.start), "stop": str(head.shard.stop)},
    )
    world.barrier(name="checkpoint/written")
    if world.rank == 0:
        (folder / MARKER).write_text("")
        for old in sorted(complete(root))[:-keep]:
            (old / MARKER).unlink()  # first, so that half a folder never looks whole
            shutil.rmtree(old)
    world.barrier(name="checkpoint/complete")
    return folder


def save_model(path: Path, backbone: dict[str, Tensor], contract: dict[str, str]) -> None:
    """The backbone alone, for whoever uses the model; contract (strings) says what it expects and returns."""
    save_tensors(backbone, path, contract)


def complete(root: Path) -> list[Path]:
    """The folders below root that hold a whole checkpoint, in no order."""
    return [marker.parent for marker in root.glob(f"step-*/{MARKER}")]


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Into a new file that takes the old one's place at once."""
    partial = path.with_name(path.name + ".partial")
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, partial, metadata)
    os.replace(partial, path)


def write_json(value: Any, path: Path) -> None:
    """Likewise, for people and scripts to read. NaN, which JSON does not have, becomes null."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(_without_nan(value), indent=2, default=str, allow_nan=False) + "\n")
    os.replace(partial, path)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
