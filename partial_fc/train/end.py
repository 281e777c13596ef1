"""The end of a run: what it has learned in its folder, what to do next in its log, and its exit status."""

import shlex
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partial_fc import checkpoint, errors, flags
from partial_fc.accessories import spare
from partial_fc.files import make_folders
from partial_fc.machine import peak_bytes
from partial_fc.optim.schedule import Continued, Schedule
from partial_fc.train.context import Context
from partial_fc.train.job import Job, Outcome
from partial_fc.train.resume import Start


def is_finished(run: Context, start: Start, schedule: Schedule | Continued) -> bool:
    """Returns whether all is trained and rank 0, its writer, finds a result (each host may have its own folder); if
    so, logs it, and leaves the world. A collective if all is trained."""
    if start.state.step != schedule.total_steps:
        return False
    there = torch.tensor([int((run.root / "result.json").exists())])
    if not run.world.broadcast(there, name="run/finished").item():
        return False
    if start.differences.allowed:
        raise errors.RefusedByAll(
            f"{run.root} holds a finished run, with {'; with '.join(start.differences.allowed)}: nothing would be "
            "trained. Start from scratch with --models-root NEW, or continue with more --max-steps or --epochs"
        )
    run.logger.info(
        f"{run.root} is finished, see result.json; to continue, raise --max-steps or --epochs; to start "
        "from scratch, give another --models-root"
    )
    run.world.close()
    return True


def finish(run: Context, job: Job, outcome: Outcome, more: Mapping[str, Any]) -> int:
    """Writes the results, leaves the world, returns the exit status. more: the recipe's additions to result.json.
    Raises OSError if the last state is in no checkpoint. A collective."""
    if outcome.stopped:
        run.logger.info(f"stopped at step {job.at.step}, as asked; {_how_to_resume(run, job)}")
    else:
        weights, *_ = job.backbone.state()  # as evaluated: with the statistics of all ranks together
        weights = {name: t.detach().cpu() for name, t in weights.items()}
        keeps = job.settings.keep
        raw = job.backbone.raw_weights() if keeps else {}
        if run.world.rank == 0:
            make_folders(run.root)  # it may have been removed
            _write_results(run, job, outcome, {"model": weights, "model-raw": raw}, more)
        run.world.barrier(name="end")
        written = run.root / "result.json"
        # If the folder is each host's own.
        elsewhere = f"{written} is on the host of rank 0"
        if raw:
            run.logger.info("model.safetensors holds the average weights, model-raw.safetensors the raw ones")
        pairs = [one.path for some in job.evaluations for one in getattr(some, "sets", ())][: int(keeps)]
        command = shlex.join(["partial-fc", "evaluate" if pairs else "report", *map(str, [run.root, *pairs])])
        run.logger.info(f"Training is over! {written if written.exists() else elsewhere}; next: `{command}`")
    if not outcome.saved:
        raise OSError(f"the last state, of step {job.at.step}, is in no checkpoint below {job.saver.root}: see above")
    run.world.close()
    return outcome.stopped


def _write_results(
    run: Context, job: Job, outcome: Outcome, models: Mapping[str, dict[str, Tensor]], more: Mapping[str, Any]
) -> None:
    """Writes the models that have weights, NAME.safetensors each, if the run keeps anything, and result.json."""
    backbone = job.backbone
    contract = {"recipe": run.recipe, **backbone.contract, "num_classes": str(job.head.num_classes)}
    contract["step"] = str(job.at.step)
    for name, weights in models.items() if job.settings.keep else ():
        path = run.root / f"{name}.safetensors"
        if weights or name == "model":  # a network of vectors may have none
            checkpoint.save_tensors(weights, path, contract)
        else:  # of this run's earlier end, with --ema
            path.unlink(missing_ok=True)
    result = {
        "loss": outcome.loss,
        "evaluations": outcome.evaluations,
        "best": job.at.best,
        **({"problems": list(dict.fromkeys(job.problems))} if job.problems else {}),
        **more,
        f"{backbone.to_input.unit}_per_s": outcome.samples_per_s,
        "seconds": run.seconds,
        "peak_memory_bytes": spare("the peak memory", peak_bytes, run.device),
        "steps": job.at.step,
        "skipped_updates": job.at.num_overflows,
        "precision": backbone.mode,
        "loss_scale": backbone.scaler.scale if backbone.scaler else 1.0,
        "world_size": run.world.size,
        "backend": run.world.backend,
        "traffic_per_step": outcome.traffic,
        "configuration": flags.flat(run.config),
        "versions": run.versions,
    }
    checkpoint.write_json(result, run.root / "result.json")


def _how_to_resume(run: Context, job: Job) -> str:
    if not job.settings.keep:
        return "nothing is kept of synthetic data"
    newest, asked = checkpoint.newest(job.saver.root), run.config.run.resume
    if not newest:
        return "there is no checkpoint to resume from"
    if asked in ("auto", "same"):
        return f"the same command resumes from {newest}"
    return f"the same command with --resume auto, in place of --resume {asked}, resumes from {newest}"
