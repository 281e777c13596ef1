"""What a run leaves behind besides its checkpoints: weights, and what there is to know of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from partial_fc import checkpoint, flags
from partial_fc.machine import peak_bytes
from partial_fc.train.context import RunContext
from partial_fc.train.job import Job, Outcome


def write_results(
    run: RunContext, job: Job, outcome: Outcome, weights: dict[str, Tensor], more: Mapping[str, Any]
) -> None:
    """model.safetensors, where the run keeps anything, and result.json. more: what the recipe adds to that."""
    backbone = job.backbone
    contract = {"recipe": run.recipe, **backbone.contract, "num_classes": str(job.head.num_classes)}
    contract["step"] = str(job.at.step)
    if run.keeps:
        checkpoint.save_tensors(weights, run.root / "model.safetensors", contract)
    result = {
        "loss": outcome.loss,
        "evaluations": outcome.evaluations,
        "best": job.at.best,
        **more,
        "images_per_s": outcome.images_per_s,
        "seconds": run.seconds,
        "peak_memory_bytes": peak_bytes(run.device),
        "steps": job.at.step,
        "skipped_updates": job.at.num_overflows,
        "precision": backbone.precision.mode,
        "loss_scale": backbone.precision.loss_scale,
        "world_size": run.world.size,
        "backend": run.world.backend,
        "traffic_per_step": outcome.traffic,
        "gradient_bytes_per_step": dataclasses.asdict(outcome.exchanged),
        "configuration": flags.flat(run.config),
        "versions": run.versions,
    }
    checkpoint.write_json(result, run.root / "result.json")
