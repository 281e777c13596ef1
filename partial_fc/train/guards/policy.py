"""The policy for NaN or Inf in a loss or a gradient: one decision for all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partial_fc.data import Batch
from partial_fc.train.job import Job

MAX_SKIPS = 10  # consecutive updates left out
MAX_ROLLBACKS = 3


class NonFinite(FloatingPointError):
    """An update with NaN or Inf, raised on all ranks alike. hopeless: other batches cannot help."""

    def __init__(self, message: str, hopeless: bool = False):
        super().__init__(message)
        self.hopeless = hopeless


@dataclass
class Pass:
    """One micro-batch, as far as it was computed."""

    output_B: Tensor  # the head's input; its .grad comes from the head
    seen: Any  # the head's state of it (last_step)


@dataclass
class Attempt:
    """The trace of an update, for a second look at NaN or Inf; all of it is kept anyway."""

    batches: Sequence[Batch]
    passes: list[Pass] = field(default_factory=list)
    # Each pass's loss, on the device, and its factor in the update's loss.
    losses: list[tuple[Tensor, float]] = field(default_factory=list)
    loss: float = 0.0


def undo(job: Job) -> None:
    """Undoes the update on all ranks: weights, centres, running statistics and margin state."""
    job.backbone.undo()
    job.head.discard()


def skip(job: Job, fault: NonFinite) -> None:
    """Applies --on-nan skip: undoes the update. Raises the fault after too many of them, or if that cannot help."""
    guards = job.guards
    guards.num_skips += 1
    undo(job)
    if fault.hopeless:
        raise NonFinite(f"{fault} --on-nan skip cannot help: every batch would meet it") from None
    if guards.num_skips > MAX_SKIPS:
        raise NonFinite(f"{fault} {MAX_SKIPS} consecutive updates before it were skipped as well") from None
    _warn(
        job, f"{fault} The update is skipped on all ranks; number {guards.num_skips} in a row, of at most {MAX_SKIPS}"
    )


def roll_back(job: Job, fault: NonFinite, position: int) -> None:
    """Restores the last checkpoint; continues with the data after position. May raise the fault. A collective."""
    guards, at = job.guards, job.at
    if guards.on_nan != "rollback":
        raise fault
    if guards.num_rollbacks == MAX_ROLLBACKS:
        raise NonFinite(f"{fault} The run has rolled back {MAX_ROLLBACKS} times already") from None
    assert guards.restore is not None
    job.head.discard()
    start = guards.restore()
    if start is None:
        raise NonFinite(
            f"{fault} --on-nan rollback: there is no checkpoint yet to go back to (see --checkpoint-every)"
        ) from None
    bad_step = at.step + 1
    at.step, checkpoint_position = start
    at.position = position
    job.loader.seek(position)
    job.backbone.train()
    guards.num_rollbacks += 1
    guards.num_skips = 0
    guards.last_equal = at.step  # `restore` has compared them
    # An earlier rollback to the same checkpoint is part of this one.
    before = [(begin, end) for begin, end in at.left_out if end <= checkpoint_position]
    at.left_out = [*before, (checkpoint_position, position)]
    _warn(
        job,
        f"{fault} Rolled back from step {bad_step} to the checkpoint of step {at.step}; the "
        f"{position - checkpoint_position:,} samples since then, up to the bad batch, are skipped. "
        f"Rollback {guards.num_rollbacks} of at most {MAX_ROLLBACKS}",
    )


def _warn(job: Job, message: str) -> None:
    """Logs on every rank, and on the terminal once, although warnings of all ranks show there."""
    (job.logger.warning if job.world.rank == 0 else job.logger.info)(message)


def weights_are_finite(job: Job) -> bool:
    """Returns whether backbone weights, and the centres of the last passes, are finite on all ranks. A collective."""
    fine = all(bool(t.isfinite().all()) for name, t in job.backbone.replicated().items() if name.startswith("weight "))
    fine = fine and not any(table.non_finite_classes() for table in job.head.tables().values())
    broken = torch.tensor([int(not fine)])
    return not job.world.all_reduce(broken, "max", name="train/weights").item()
