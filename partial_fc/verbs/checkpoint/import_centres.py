"""`partial-fc checkpoint import`: converts centre files of other trainers, of any number of ranks, to a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from partial_fc.flags.facts import CLASSES, PIXELS, In

if TYPE_CHECKING:
    from torch import Tensor

    from partial_fc.foreign.centre_files import CentreFiles, ForeignRows


@dataclass(frozen=True)
class ImportOptions:
    """Joins class centres of InsightFace's trainers, a file for each rank, to a checkpoint that any number of ranks
    loads. With the backbone (--network), --resume OUT continues from it; without it, train.py face loads the centres by
    --start-centres OUT, and the backbone by --pretrained."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
    """The files of all ranks, or their folder: R_centers.param and R_centers_mom.param (its trainer of 2020);
    checkpoint_gpu_R.pt, softmax_fc_gpu_R.pt, or rank_R_softmax_weight.pt and rank_R_softmax_weight_mom.pt
    (arcface_torch)."""
    out: Path
    """The folder of the new checkpoint."""
    num_classes: Annotated[int | None, In(CLASSES)] = None
    """Number of classes; required for .param files, which may end with padding."""
    network: Literal["r18", "r34", "r50", "r100", "r200", "mbf"] | None = None
    """The network of checkpoint_gpu_0.pt; none: the backbone is left out."""
    image_size: Annotated[int, In(PIXELS)] = 112
    """Image size of that training."""
    momentum_lr: Annotated[float | None, In("(0, inf)")] = None
    """The learning rate of the last steps; required for R_centers_mom.param."""
    step: int = 0
    """The step to resume from: number of updates made."""
    position: int = 0
    """The position to resume from: number of samples consumed."""


def import_centres(options: ImportOptions) -> None:
    """Writes the checkpoint. Raises ValueError for inconsistent files or unexpected contents."""
    from partial_fc.checkpoint.output import new_checkpoint, print_notes
    from partial_fc.foreign.centre_files import ForeignRows, find
    from partial_fc.head.rows import RowAdamW, RowSGD

    if (options.step or options.position) and not options.network:
        raise ValueError("--step and --position are for a checkpoint with its backbone; give --network")
    files = find(options.files)
    rows = ForeignRows(files, options.num_classes, options.momentum_lr)
    optimizer = "adamw" if "first_moment" in rows.file_states else "sgd"
    row_optimizer = RowAdamW() if optimizer == "adamw" else RowSGD()
    rows.set_state(row_optimizer, touched=options.step)
    # Every row stands for all steps: what is imported has either been moved in each of them, or is to go on as it is.
    schedule = {"optimizer": repr(row_optimizer), "first": options.step, "rates": []}
    notes = rows.notes
    weights, state, facts = _backbone(files, options, rows.width)
    if facts:
        stood = ", ".join(f"{key} {value}" for key, value in facts.items())
        notes.append(
            f"{files.paths[0]} is of {stood}; to continue from there, give --step and --position; otherwise training "
            "starts at step 0 of its own schedule"
        )
    if optimizer == "sgd" and "momentum" not in rows.file_states:
        notes.append("the files have no momentum for the centres: it starts at zero")
    made_by = f"imported from {len(files.paths)} file(s), {files.kind.what}: {files.paths[0]} ..."
    with new_checkpoint(options.out, _manifest(options, rows, schedule), None, made_by) as output:
        output.rows(rows)
        if weights is not None:
            output.tensors("backbone.safetensors", weights)
            output.tensors("optimizer.safetensors", state)
    print_notes(notes)
    start = "--resume" if weights is not None else "--start-centres"
    print(
        f"{options.out}: {rows.stop} classes of {rows.width} features, for {optimizer}; start with {start} "
        f"{options.out}"
    )


def _backbone(
    files: "CentreFiles", options: ImportOptions, width: int
) -> "tuple[dict[str, Tensor] | None, dict[str, Tensor], dict[str, int]]":
    """Returns (weights, the optimizer's state by name, the training's progress)."""
    from partial_fc import models
    from partial_fc.foreign import arcface_torch
    from partial_fc.foreign.centre_files import CHECKPOINT
    from partial_fc.foreign.state_dicts import load_state

    if options.network is None:
        return None, {}, {}
    model = models.build(options.network, width, options.image_size)
    path = files.paths[0]
    if files.kind is not CHECKPOINT:
        raise ValueError(
            f"--network {options.network}: {path} holds no backbone; import without it, and start with --start-centres "
            "OUT --pretrained FILE"
        )
    weights, state, facts = arcface_torch.backbone_of(path, [name for name, _ in model.named_parameters()])
    load_state(model, weights, path)
    return model.state_dict(), state, facts


def _manifest(options: ImportOptions, rows: "ForeignRows", schedule: dict[str, Any]) -> dict[str, Any]:
    import torch

    contract = {"network": options.network, "embedding_size": str(rows.width), "image_size": str(options.image_size)}
    table = {
        "num_classes": rows.stop,
        "embedding_size": rows.width,
        "sub_centres": 1,
        "hard_negatives": 0,
        "head": {"num_steps": options.step, "row_seed": 0, "margin": {}, "schedule": schedule},
    }
    return {
        "step": options.step,
        "world_size": 1,
        "tables": {"": table},
        "head": {},
        "position": options.position,
        "best": {},
        "recipe": "face",
        "contract": {**contract, "flip": "true"} if options.network else {},
        "versions": {"torch": torch.__version__},
    }
