"""The search for the first tensor with NaN or Inf: an update that failed is repeated on all ranks.

The order follows the computation: weights, centres, a second forward pass of the same batch with every module's output,
features, the rows of the loss, and a second backward pass. The first finding in this order, over all ranks, is
reported. Weights, running statistics and gradients stay as they are.

A file for each rank, models_root/non-finite/step-SSSSSSSS-rank-RRRRR.json, has the batch's record keys and labels.
"""

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from partial_fc import counter_rng
from partial_fc.accessories import spare
from partial_fc.comm import all_gather_json
from partial_fc.train.guards.policy import Attempt
from partial_fc.train.job import Job


def find_first_non_finite(job: Job, attempt: Attempt, symptom: str) -> str:
    """Returns the symptom with the first tensor that has NaN or Inf, its rank, and the file with the batch. A
    collective; all ranks check the same tensors whatever they find, as batch norms over all ranks need them all."""
    look = _Look()
    for name, t in job.backbone.replicated().items():
        if name.startswith("weight "):
            look.at(t, name)
    for name, table in job.head.tables().items():
        classes, where = ", ".join(map(str, table.non_finite_classes())), f" in table {name}" if name else ""
        look.next([f"the centres of classes {classes}{where}"] if classes else [])
    _second_forward(job, attempt, look)
    first_W = all_gather_json(look.first, job.world, "train/non_finite")
    if not any(first_W):
        _second_backward(job, attempt, look)
        first_W = all_gather_json(look.first, job.world, "train/non_finite")
    folder, step = job.models_root / "non-finite", job.at.step + 1
    path = folder / f"step-{step:08d}-rank-{job.world.rank:05d}.json"
    spare(f"the batch below {folder}", _write_down, job, attempt, symptom, look, path)
    return (
        f"{symptom}. {_in_words(first_W)} Nothing was updated in this step; the last checkpoint remains. "
        f"Each rank's record keys and labels: {folder / f'step-{step:08d}-rank-*.json'}."
    )


class _Look:
    """The tensors checked so far, in the same order on all ranks."""

    def __init__(self) -> None:
        self.first: tuple[int, str] | None = None  # the first with NaN or Inf, with its number in the order
        self._number = 0

    def next(self, found: list[str]) -> None:
        """Adds a tensor; found: its NaN and Inf values."""
        self._number += 1
        if found and self.first is None:
            self.first = (self._number, found[0])

    def at(self, t: Tensor, what: str) -> None:
        finite = t.isfinite()
        not_finite = t.numel() - int(finite.sum())
        others = f", the largest of the others {t[finite].abs().max().item():.3g}" if 0 < not_finite < t.numel() else ""
        self.next([f"{what}: {not_finite:,} of {t.numel():,} values{others}"] if not_finite else [])


def _second_forward(job: Job, attempt: Attempt, look: _Look) -> None:
    def look_at_output(name: str, kind: str, output: Tensor) -> None:
        look.at(output, f"the output of module {name} ({kind})" if name else "the features")

    passes = list(zip(attempt.passes, attempt.batches, strict=False))  # the last batches may be missing
    _draw_the_same(job)
    for _, batch in passes:
        job.backbone.name_samples(batch.position_B)
        job.backbone.watch_outputs(batch.input_B, look_at_output)
    for one, batch in passes:  # not explained by a second forward
        bad_B = (~one.output_B.detach().isfinite().all(dim=1)).cpu()
        again = "while a second forward of the same batch gives finite ones (a faulty memory or processor?)"
        look.next([f"the features of record {key}, {again}" for key in batch.key_B[bad_B].tolist()])
        loss_B = job.head.row_losses(one.seen, len(batch.key_B)).cpu()
        rows = zip(batch.key_B.tolist(), batch.label_B.tolist(), loss_B.tolist(), strict=True)
        look.next(
            [f"the loss of record {k}, label {label}: {loss}" for k, label, loss in rows if not math.isfinite(loss)]
        )


def _second_backward(job: Job, attempt: Attempt, look: _Look) -> None:
    """Checks this rank's gradient, which the sum over the ranks has replaced; then the sum."""
    _draw_the_same(job)
    for one, batch in zip(attempt.passes, attempt.batches, strict=False):
        grad_B = one.output_B.grad
        if grad_B is None:  # backward was not reached, on any rank
            continue
        look.at(grad_B, "the gradient of the features")
        job.backbone.name_samples(batch.position_B)
        for name, g in job.backbone.gradients(batch.input_B, grad_B).items():
            look.at(g, f"the gradient of {name}")
    for name, g in job.backbone.gradients().items():
        look.at(g, f"the sum over the ranks of the gradient of {name}")


def _draw_the_same(job: Job) -> None:
    """Makes dropout draw as in the update."""
    torch.manual_seed(counter_rng.derive_key(job.seed, job.at.step, job.world.rank))


def _in_words(first_W: list[tuple[int, str] | None]) -> str:
    """Describes the finding, with the same sentence on all ranks."""
    found = [(first[0], rank, first[1]) for rank, first in enumerate(first_W) if first]
    if not found:
        return "A second look at the same batch finds all finite (a faulty memory or processor?)."
    number, rank, what = min(found)
    others = sum(other == number for other, _, _ in found) - 1
    also = f" (and on {others} other{'s' if others > 1 else ''})" if others else ""
    return f"The first tensor that is not finite, on rank {rank}{also}: {what}."


def _write_down(job: Job, attempt: Attempt, symptom: str, look: _Look, path: Path) -> None:
    report = {
        "step": job.at.step + 1,
        "rank": job.world.rank,
        "symptom": symptom,
        "first_on_this_rank": look.first[1] if look.first else None,
        "loss": attempt.loss if math.isfinite(attempt.loss) else str(attempt.loss),  # JSON has no NaN
        "loss_scale": job.backbone.scaler.scale if job.backbone.scaler else 1.0,
        "position": attempt.batches[-1].position,
        "micro_batches": [
            {"keys": batch.key_B.tolist(), "labels": batch.label_B.tolist()} for batch in attempt.batches
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
