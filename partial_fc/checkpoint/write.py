"""Writes checkpoints and the final model."""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from partial_fc.checkpoint import head_rows
from partial_fc.checkpoint.files import save_tensors, write_json
from partial_fc.comm import World
from partial_fc.head import PartialFC

FORMAT = 3
MARKER = "COMPLETE"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def save(
    root: Path,
    step: int,
    backbone: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    head: PartialFC,
    exchange: dict[str, Tensor],
    facts: dict[str, Any],
    world: World,
    keep: int,
) -> Path:
    """All ranks write the state after `step` updates to root/step-N, and remove all but the newest `keep`.

    exchange: what this rank's gradient compression remembers (GradientSync.state). facts: what else is to be found
    again, as JSON (position, best scores, configuration). A collective.
    """
    folder = root / folder_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    if world.rank == 0:
        (folder / MARKER).unlink(missing_ok=True)  # of an earlier try at this step
        save_tensors(backbone, folder / "backbone.safetensors")
        save_tensors(optimizer, folder / "optimizer.safetensors")
        manifest = {"format": FORMAT, "step": step, **head_rows.facts(head), **facts}
        write_json(manifest, folder / "manifest.json")
    head_rows.save(head, folder)
    name = exchange_name(world.rank, world.size)
    (folder / name).unlink(missing_ok=True)  # of an earlier try at this step
    if exchange:
        save_tensors(exchange, folder / name)
    world.barrier(name="checkpoint/written")
    if world.rank == 0:
        (folder / MARKER).write_text("")
        for old in sorted(complete(root))[:-keep]:
            (old / MARKER).unlink()  # first, so that half a folder never looks whole
            shutil.rmtree(old)
    world.barrier(name="checkpoint/complete")
    return folder


def exchange_name(rank: int, world_size: int) -> str:
    """The file of what this rank's gradient compression remembers."""
    return f"exchange-{rank:05d}-of-{world_size:05d}.safetensors"


def save_model(path: Path, backbone: dict[str, Tensor], contract: dict[str, str]) -> None:
    """The backbone alone, for whoever uses the model; contract (strings) says what it expects and returns."""
    save_tensors(backbone, path, contract)


def complete(root: Path) -> list[Path]:
    """The folders below root that hold a whole checkpoint, in no order."""
    return [marker.parent for marker in root.glob(f"step-*/{MARKER}")]
