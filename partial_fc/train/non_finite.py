"""A loss or a gradient that is not finite: one verdict for all ranks, and what then happens to the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partial_fc.data import Batch
from partial_fc.train.job import Job
from partial_fc.train.running_statistics import RunningStatistics


class NonFinite(FloatingPointError):
    """Raised on all ranks alike. hopeless: it would be the same with any other batch."""

    def __init__(self, message: str, hopeless: bool = False):
        super().__init__(message)
        self.hopeless = hopeless


@dataclass
class Pass:
    """One micro-batch, as far as it came."""

    label_B: Tensor
    feat_BD: Tensor  # its .grad: what the head gave back
    seen: dict[str, Tensor]  # PartialFC.last_step of it


@dataclass
class Attempt:
    """What an update leaves for a second look, if its numbers are not finite: nothing that it did not have anyway."""

    batches: Sequence[Batch]
    passes: list[Pass] = field(default_factory=list)
    loss: float = 0.0
    summed: bool = False  # whether the backbone's gradient is already the sum over the ranks
    centres_moved: bool = False


def undo(job: Job, attempt: Attempt, before: RunningStatistics) -> None:
    """The update is made on no rank, and leaves no trace: weights, centres, running statistics, and what compression
    and margin remember, are as they were."""
    assert not attempt.centres_moved
    before.restore()
    if attempt.summed:
        job.sync.undo()
    job.head.discard()


def skip(job: Job, attempt: Attempt, before: RunningStatistics, fault: NonFinite) -> None:
    """--on-nan skip: undoes the update. Raises the fault where that has gone on for too long, or cannot help."""
    guards = job.guards
    guards.num_skips += 1
    undo(job, attempt, before)
    if fault.hopeless:
        raise NonFinite(f"{fault} --on-nan skip cannot help: every batch would meet it") from None
    if guards.num_skips > guards.max_skips:
        raise NonFinite(
            f"{fault} {guards.max_skips} updates before it were left out as well, one after the other: more "
            "than --max-skips allows"
        ) from None
    _say(
        job,
        f"{fault} The update is made on no rank; number {guards.num_skips} in a row, of at most {guards.max_skips}",
    )


def roll_back(job: Job, fault: NonFinite, position: int) -> None:
    """--on-nan rollback: the state of the last checkpoint, and the data after the batch that ended at this position.
    Raises the fault where another thing was asked for, or there have been too many. A collective."""
    guards = job.guards
    if guards.on_nan != "rollback":
        raise fault
    if guards.num_rollbacks == guards.max_rollbacks:
        raise NonFinite(
            f"{fault} The run has gone back {guards.num_rollbacks} times already, as often as --max-rollbacks allows"
        ) from None
    assert guards.restore is not None
    job.head.discard()
    start = guards.restore()
    if start is None:
        raise NonFinite(
            f"{fault} --on-nan rollback: there is no checkpoint yet to go back to (see --checkpoint-every)"
        ) from None
    bad_step = job.step + 1
    job.step, checkpoint_position = start
    job.position = position
    job.loader.go_to(position)
    job.backbone.train()
    guards.num_rollbacks += 1
    guards.num_skips = 0
    guards.last_equal = job.step  # `restore` has compared them
    # A rollback before, if to the same checkpoint, is part of this one.
    before = [(begin, end) for begin, end in job.left_out if end <= checkpoint_position]
    job.left_out = [*before, (checkpoint_position, position)]
    _say(
        job,
        f"{fault} Back from step {bad_step} to the checkpoint of step {job.step}; the "
        f"{position - checkpoint_position:,} samples since then, the bad batch the last of them, are left out. "
        f"Rollback {guards.num_rollbacks} of at most {guards.max_rollbacks}",
    )


def _say(job: Job, words: str) -> None:
    """All ranks know it; warnings of all of them show on the terminal."""
    (job.logger.warning if job.world.rank == 0 else job.logger.info)(words)


def weights_are_finite(job: Job) -> bool:
    """Of the backbone, and the centres that the last passes saw, on all ranks. A collective."""
    fine = all(bool(p.detach().isfinite().all()) for _, p in job.weights.named_parameters())
    fine = fine and not bad_classes(job)
    broken = torch.tensor([int(not fine)])
    return not job.world.all_reduce(broken, "max", name="train/weights").item()


def bad_classes(job: Job, most: int = 5) -> list[int]:
    """Up to `most` classes of this rank with a centre that is not finite, of those that the last passes saw."""
    head, rows_at_once = job.head, 1 << 14
    found: set[int] = set()
    for part in head.pending:
        table, row_S = part.logits.centre_LD, part.logits.row_S
        for begin in range(0, part.logits.num_sampled, rows_at_once):
            stop = min(begin + rows_at_once, part.logits.num_sampled)
            centre_KD = table[begin:stop] if row_S is None else table[row_S[begin:stop]]
            if centre_KD.sum().isfinite():  # neither NaN nor infinity vanishes in a sum
                continue
            bad_K = (~centre_KD.isfinite().all(dim=1)).nonzero().flatten() + begin
            local_K = bad_K if part.rows is None else part.rows[bad_K]
            found |= set((local_K // head.sub_centres + head.shard.start).tolist())
            if len(found) >= most:
                break
    return sorted(found)[:most]
