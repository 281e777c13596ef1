"""Where a run of recipe `mnist` stands: written after each epoch, found again, and taken from Apex's files.

A checkpoint is that of `partial_fc.checkpoint` without a head: the ConvNet with the batch-norm statistics of all ranks
together, momentum, and what each rank has for itself.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from partial_fc import checkpoint
from partial_fc.checkpoint.consistency import newest_common, open_checkpoint
from partial_fc.checkpoint.folders import step_of
from partial_fc.checkpoint.snapshot import FORMAT
from partial_fc.foreign import apex
from partial_fc.optim.backbone import load_named_state, named_state
from partial_fc.train.precision import LossScaler
from partial_fc.train.running_statistics import joined_statistics

if TYPE_CHECKING:
    from recipes.mnist import Run

# Flags that make another run of one that is resumed, although nothing refuses them.
_SAME_RUN = (
    "seed",
    "batch_size",
    "accumulate",
    "lr",
    "momentum",
    "sync_bn",
    "precision",
    "gradient_compression",
)
# What the place within an epoch is counted in.
_IN_EPOCH = ("seed", "batch_size", "accumulate")


@dataclass
class Position:
    """The next update: number `update` of epoch `epoch`, both from 0, after `step` ones in all."""

    epoch: int = 0
    update: int = 0
    step: int = 0
    best: float = 0.0  # test accuracy so far
    skipped: int = 0  # updates that were not made, as their gradients overflowed


def save(run: "Run") -> None:
    """All ranks write where the run stands, and return when it is on the disk. A collective."""
    own = {f"buffer/{name}": t for name, t in run.model.named_buffers()}
    own |= {f"exchange/{name}": t for name, t in run.sync.state().items()}
    model = model_state(run)
    optimizer = named_state(run.optimizer, run.weights)
    world = run.world
    run.saver.begin(
        checkpoint.Snapshot(world.rank, world.size, run.position.step, _manifest(run), model, optimizer, own)
    )
    run.saver.finish()
    if world.rank == 0 and run.config.save_amp:
        scaler = run.precision.scaler
        state = (scaler.scale, scaler.clean_steps) if scaler else (1.0, 0)
        apex.write(run.config.save_amp, model, run.optimizer, *state)


def model_state(run: "Run") -> dict[str, Tensor]:
    """fp32 weights, and the batch-norm statistics of all ranks together. A collective."""
    with joined_statistics(run.model, run.world):
        return {name: t.detach().clone() for name, t in run.weights.state_dict().items()}


def _manifest(run: "Run") -> dict:
    return {
        "format": FORMAT,
        "recipe": "mnist",
        "step": run.position.step,
        "position": dataclasses.asdict(run.position),
        "scaler": run.precision.scaler.state() if run.precision.scaler else None,
        "world_size": run.world.size,
        "configuration": dataclasses.asdict(run.config),
    }


def resume(run: "Run", num_updates: int) -> Position:
    """Gives the run the state that it starts from: a given checkpoint, else the newest of this run, else --load-amp,
    else none. A collective. Raises ValueError, on all ranks, where they find different ones."""
    config = run.config
    newest = newest_common(run.saver.root, run.world)
    folder = {"never": None, "auto": newest}.get(config.resume, Path(config.resume))
    found = open_checkpoint(folder, run.world)
    if newest and (found.step if found else -1) < step_of(newest):
        # Checkpoints are kept and found by their step: those of the other run would count as the newest.
        raise ValueError(
            f"{newest} is ahead of where this run would start (--resume {config.resume}); use another --models-root, "
            "or remove the checkpoints that are not wanted"
        )
    if found:
        if config.load_amp:
            run.logger.info(f"note: --load-amp {config.load_amp} is for a new run; this one goes on from {folder}")
        return _load(run, found, num_updates)
    if config.load_amp:
        _load_amp(run, config.load_amp)
    return Position()


def _load(run: "Run", found: checkpoint.Checkpoint, num_updates: int) -> Position:
    manifest, config, world = found.manifest, run.config, run.world
    if manifest.get("recipe") != "mnist":
        raise ValueError(f"{found.folder} is not a checkpoint of recipe mnist; use another --models-root")
    position = Position(**manifest["position"])
    _check_position(run, found, position, num_updates)
    for name in _SAME_RUN:
        then, now = manifest["configuration"][name], getattr(config, name)
        if then != now:
            flag = f"--{name.replace('_', '-')}"
            run.logger.info(
                f"note: {found.folder} was trained with {flag} {then}, this run has {now}: not the same run"
            )
    run.weights.load_state_dict(found.backbone())
    load_named_state(run.optimizer, run.weights, found.optimizer())
    if run.precision.scaler and manifest["scaler"]:
        run.precision.scaler.load_state(manifest["scaler"])
    _load_own(run, found)
    world.barrier(name="mnist/resumed")
    run.logger.info(f"resumed from {found.folder}")
    return position


def _check_position(run: "Run", found: checkpoint.Checkpoint, position: Position, num_updates: int) -> None:
    then, config = found.manifest["configuration"], run.config
    if position.epoch > config.epochs or (config.max_steps is not None and position.step > config.max_steps):
        raise ValueError(
            f"{found.folder} is beyond this run's end, at epoch {position.epoch}, step {position.step}; use another "
            "--models-root, or more --epochs or --max-steps"
        )
    changed = [name for name in _IN_EPOCH if then[name] != getattr(config, name)]
    if found.manifest["world_size"] != run.world.size:
        changed.append("number of processes")
    if position.update and changed:
        raise ValueError(
            f"{found.folder} is in the midst of epoch {position.epoch + 1}, and this run's {', '.join(changed)} would "
            "continue it with other images; go on as it was, or from a checkpoint at the end of an epoch (--resume DIR)"
        )
    assert position.update < num_updates or changed


def _load_own(run: "Run", found: checkpoint.Checkpoint) -> None:
    """What each rank has for itself. Of another number of ranks: batch norms go on with the joined statistics, and what
    compression owes is shared out."""
    buffers = dict(run.model.named_buffers())
    for name, t in found.buffers(run.world).items():
        buffers[name].copy_(t)
    if found.manifest["configuration"]["gradient_compression"] == run.config.gradient_compression:
        run.sync.load_state(found.exchange(run.world))
    # else: another compression owes nothing; the flags' difference has been noted


def _load_amp(run: "Run", path: Path) -> None:
    found = apex.read(path)
    run.weights.load_state_dict(apex.model_state(found, run.weights.state_dict()))
    for note in apex.load_optimizer(found, run.optimizer):
        run.logger.info(f"note: {note}")
    scaler = run.precision.scaler
    if scaler and found.loss_scale != 1:
        clean = found.unskipped if found.unskipped < LossScaler.GROWTH_INTERVAL else 0
        scaler.load_state({"scale": found.loss_scale, "clean_steps": clean})
    elif scaler or found.loss_scale != 1:
        run.logger.info(
            f"note: {path} has loss scale {found.loss_scale:g}; this run, --precision {run.precision.mode}, has "
            f"{f'{scaler.scale:g}' if scaler else 'none'}"
        )
    run.logger.info(f"started from {path}")
