"""Names the first tensor that was not finite: a second look at an update that failed, on all ranks.

From what it was computed from to what came out: weights, centres, then a second forward pass of the same batch with a
look at every module's output, features, the rows of the loss, and a second backward pass. The first find in this order
counts, over all ranks. Weights, running statistics and gradients stay as they are.

A file for each rank, models_root/non-finite/step-SSSSSSSS-rank-RRRRR.json, has the batch's record keys and labels, and
the largest values of everything that was looked at.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partial_fc import counter_rng
from partial_fc.comm import World
from partial_fc.train.guards.policy import Attempt
from partial_fc.train.job import Job

_MOST_BYTES = 1024  # of a finding on its way to the other ranks
_MOST_NAMES = 20  # of weights and gradients in the file


class Finding(NamedTuple):
    """order: findings with a smaller one come first."""

    order: tuple[int, int]
    what: str


# What was looked at -> name -> the largest finite value, and how many values are not finite.
Largest = dict[str, dict[str, Any]]


def find_first_non_finite(job: Job, attempt: Attempt, symptom: str) -> str:
    """The symptom, with the first tensor that was not finite, on which rank, and where the batch is written down. A
    collective; no rank's finding makes it call another one than the others."""
    largest: Largest = {}
    torch.manual_seed(counter_rng.derive_key(job.seed, job.at.step, job.world.rank))
    local = _look_at_state(job, largest) or _second_forward(job, attempt, largest) or _look_at_head(job, attempt)
    findings_W = _gather(local, job.world)
    if not any(findings_W):
        torch.manual_seed(counter_rng.derive_key(job.seed, job.at.step, job.world.rank))
        local = _second_backward(job, attempt, largest) or _look_at_sums(job, largest)
        findings_W = _gather(local, job.world)
    folder = job.models_root / "non-finite"
    problem = _write_down(job, attempt, symptom, local, largest, folder)
    return f"{symptom}. {_in_words(findings_W)} {_how_far(attempt)} {_where(folder, job.at.step + 1, problem)}"


# ---- what the update was computed from


def _look_at_state(job: Job, largest: Largest) -> Finding | None:
    weights = dict(job.backbone.named_weights())
    largest["weights"] = _largest_of(weights)
    for number, (name, weight) in enumerate(weights.items()):
        if not weight.isfinite().all():
            return Finding((0, number), f"weight {name} ({_amount(weight)})")
    if classes := job.head.non_finite_classes():
        return Finding((1, 0), f"the centres of classes {', '.join(map(str, classes))}")
    return None


# ---- forward


def _second_forward(job: Job, attempt: Attempt, largest: Largest) -> Finding | None:
    """Runs to the end also where something is found: with --sync-bn the ranks talk to each other in it."""
    first: Finding | None = None
    outputs = largest.setdefault("outputs", {})

    def look(name: str, kind: str, output: Tensor) -> None:
        nonlocal first
        outputs[name or "features"] = _largest(output)
        if first is None and not output.isfinite().all():
            what = f"the output of module {name} ({kind})" if name else "the features"
            first = Finding((2, len(outputs)), f"{what}: {_amount(output)}")

    with job.backbone.statistics_kept():
        for batch in attempt.batches[: len(attempt.passes)]:
            job.backbone.watch_outputs(batch.input_B, look)
    return first


def _look_at_head(job: Job, attempt: Attempt) -> Finding | None:
    """Features and rows of the loss that a second forward does not explain."""
    for number, one in enumerate(attempt.passes):
        key_B = attempt.batches[number].key_B
        for i in (~one.output_B.detach().isfinite().all(dim=1)).nonzero().flatten().tolist():
            return Finding(
                (3, i),
                f"the features of record {key_B[i]}, while a second forward of the same batch gives finite ones (a "
                "memory or a processor that makes mistakes?)",
            )
        loss_B = job.head.row_losses(one.seen, len(key_B))
        for i in (~loss_B.isfinite()).nonzero().flatten().tolist():
            return Finding((4, i), f"the loss of record {key_B[i]}, label {one.label_B[i]}: {loss_B[i]}")
    return None


# ---- backward


def _second_backward(job: Job, attempt: Attempt, largest: Largest) -> Finding | None:
    """Looks at this rank's part of the gradient, which the sum over the ranks has taken the place of."""
    first: Finding | None = None
    with job.backbone.statistics_kept():
        for number, one in enumerate(attempt.passes):
            grad_B = one.output_B.grad
            if grad_B is None:  # backward did not come so far, on no rank
                continue
            largest.setdefault("feature gradient", {})[str(number)] = _largest(grad_B)
            gradients = job.backbone.gradients(attempt.batches[number].input_B, grad_B)
            largest["gradients of this rank"] = _largest_of(gradients)
            if first is None and not grad_B.isfinite().all():
                first = Finding((5, number), f"the gradient of the features ({_amount(grad_B)})")
            first = first or _first_of(gradients, 6, "the gradient of")
    return first


def _look_at_sums(job: Job, largest: Largest) -> Finding | None:
    sums = job.backbone.summed_gradients()
    largest["summed gradients"] = _largest_of(sums)
    return _first_of(sums, 7, "the sum over the ranks of the gradient of")


def _first_of(gradients: dict[str, Tensor], stage: int, what: str) -> Finding | None:
    for number, (name, g) in enumerate(gradients.items()):
        if not g.isfinite().all():
            return Finding((stage, number), f"{what} {name} ({_amount(g)})")
    return None


# ---- words


def _largest(t: Tensor) -> dict[str, Any]:
    finite = t.isfinite()
    values = t[finite].abs()
    return {"largest": values.max().item() if values.numel() else None, "not_finite": t.numel() - int(finite.sum())}


def _largest_of(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Of those with values that are not finite, then those with the largest."""
    found = {name: _largest(t.detach()) for name, t in tensors.items() if t.numel()}
    order = sorted(found, key=lambda name: (-found[name]["not_finite"], -(found[name]["largest"] or 0.0)))
    return {name: found[name] for name in order[:_MOST_NAMES]}


def _amount(t: Tensor) -> str:
    one = _largest(t)
    largest = "" if one["largest"] is None else f", the largest of the others {one['largest']:.3g}"
    return f"{one['not_finite']:,} of {t.numel():,} values{largest}"


def _gather(local: Finding | None, world: World) -> list[Finding | None]:
    """Every rank's finding, by rank."""
    text = b"" if local is None else json.dumps([*local.order, local.what[: _MOST_BYTES // 2]]).encode()
    line = torch.zeros(1, _MOST_BYTES, dtype=torch.uint8)
    line[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    findings: list[Finding | None] = []
    for row in world.all_gather(line, name="train/non_finite"):
        content = bytes(row.tolist()).rstrip(b"\0")
        stage, number, what = json.loads(content) if content else (0, 0, "")
        findings.append(Finding((stage, number), what) if content else None)
    return findings


def _in_words(findings_W: list[Finding | None]) -> str:
    """The same sentence on all ranks."""
    there = [(finding.order, rank, finding.what) for rank, finding in enumerate(findings_W) if finding]
    if not there:
        return "A second look at the same batch finds all finite (a memory or a processor that makes mistakes?)."
    order, rank, what = min(there)
    others = [other for other_order, other, _ in there if other_order == order and other != rank]
    also = f" (and on {len(others)} other{'s' if len(others) > 1 else ''})" if others else ""
    return f"The first tensor that is not finite, on rank {rank}{also}: {what}."


def _how_far(attempt: Attempt) -> str:
    if not attempt.centres_moved:
        return "Nothing was updated in this step; the last checkpoint stands."
    return "The centres of this step have moved, the backbone has not; the last checkpoint stands."


def _where(folder: Path, step: int, problem: str) -> str:
    if problem:
        return f"(The batch could not be written to {folder}: {problem}.)"
    return f"Each rank's record keys, labels and largest values: {folder / f'step-{step:08d}-rank-*.json'}."


def _write_down(job: Job, attempt: Attempt, symptom: str, local: Finding | None, largest: Largest, folder: Path) -> str:
    """Returns what kept it from that: the disk's trouble must not hide this one."""
    step = job.at.step + 1
    report = {
        "step": step,
        "rank": job.world.rank,
        "symptom": symptom,
        "first_on_this_rank": local.what if local else None,
        "loss": attempt.loss if math.isfinite(attempt.loss) else str(attempt.loss),  # JSON has no NaN
        "loss_scale": job.backbone.scaler.scale if job.backbone.scaler else 1.0,
        "position": attempt.batches[-1].position,
        "micro_batches": [
            {
                "keys": batch.key_B.tolist(),
                "labels": batch.label_B.tolist(),
                "pixel_mean": _rounded(batch.input_B.flatten(1).float().mean(dim=1)),
                "pixel_spread": _rounded(batch.input_B.flatten(1).float().std(dim=1)),
            }
            for batch in attempt.batches
        ],
        "largest": largest,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{step:08d}-rank-{job.world.rank:05d}.json"
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        return f"{error.strerror}: {folder}"
    return ""


def _rounded(value_B: Tensor) -> list[float]:
    return [round(x, 2) for x in value_B.tolist()]
