"""Which tensor was the first that was not finite: a second look at an update that failed, on all ranks.

From what it was computed from to what came out: weights, centres, then a second forward pass of the same batch with a
look at every module's output, features, the rows of the loss, and a second backward pass. The first find in this order
counts, over all ranks. Weights, running statistics and gradients stay as they are.

A file for each rank, models_root/non-finite/step-SSSSSSSS-rank-RRRRR.json, has the batch's record keys and labels, and
the largest values of everything that was looked at.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partial_fc import counter_rng
from partial_fc.comm import World
from partial_fc.models import normalise
from partial_fc.train.job import Job
from partial_fc.train.non_finite import Attempt, bad_classes
from partial_fc.train.running_statistics import RunningStatistics

_MOST_BYTES = 1024  # of a find on its way to the other ranks
_MOST_NAMES = 20  # of weights and gradients in the file


class Find(NamedTuple):
    """order: finds with a smaller one come first."""

    order: tuple[int, int]
    what: str


Largest = dict[str, dict[str, Any]]  # what -> name -> largest finite value, or that and how many are not finite


def look_again(job: Job, attempt: Attempt, symptom: str) -> str:
    """The symptom, with the first tensor that was not finite, on which rank, and where the batch is written down. A
    collective; no rank's find makes it call another one than the others."""
    largest: Largest = {}
    torch.manual_seed(counter_rng.derive_key(job.seed, job.step, job.world.rank))
    own = _given(job, largest) or _second_forward(job, attempt, largest) or _of_the_head(job, attempt)
    found = _all_finds(own, job.world)
    if not any(found):
        torch.manual_seed(counter_rng.derive_key(job.seed, job.step, job.world.rank))
        own = _second_backward(job, attempt, largest) or _summed(job, largest)
        found = _all_finds(own, job.world)
    folder = job.models_root / "non-finite"
    problem = _write_down(job, attempt, symptom, own, largest, folder)
    return f"{symptom}. {_in_words(found)} {_how_far(attempt)} {_where(folder, job.step + 1, problem)}"


# ---- what the update was computed from


def _given(job: Job, largest: Largest) -> Find | None:
    named = [(name, p.detach()) for name, p in job.weights.named_parameters()]
    largest["weights"] = _largest_of(dict(named))
    for number, (name, p) in enumerate(named):
        if not p.isfinite().all():
            return Find((0, number), f"weight {name} ({_amount(p)})")
    if classes := bad_classes(job):
        return Find((1, 0), f"the centres of classes {', '.join(map(str, classes))}")
    return None


# ---- forward


def _second_forward(job: Job, attempt: Attempt, largest: Largest) -> Find | None:
    """Runs to the end also where something is found: with --sync-bn the ranks talk to each other in it."""
    first: Find | None = None
    outputs = largest.setdefault("outputs", {})

    def look(module: nn.Module, name: str, output: Any) -> None:
        nonlocal first
        if not isinstance(output, Tensor):
            return
        outputs[name or "features"] = _largest(output)
        if first is None and not output.isfinite().all():
            what = f"the output of module {name} ({type(module).__name__})" if name else "the features"
            first = Find((2, len(outputs)), f"{what}: {_amount(output)}")

    with _like_before(job), torch.no_grad():
        hooks = [
            module.register_forward_hook(lambda module, _input, output, name=name: look(module, name, output))
            for name, module in job.backbone.named_modules()
        ]
        try:
            for number in range(len(attempt.passes)):
                _features(job, attempt, number)
        finally:
            for hook in hooks:
                hook.remove()
    return first


def _of_the_head(job: Job, attempt: Attempt) -> Find | None:
    """Features and rows of the loss that a second forward does not explain."""
    for number, one in enumerate(attempt.passes):
        key_B = attempt.batches[number].key_B
        for i in (~one.feat_BD.detach().isfinite().all(dim=1)).nonzero().flatten().tolist():
            return Find(
                (3, i),
                f"the features of record {key_B[i]}, while a second forward of the same batch gives finite ones (a "
                "memory or a processor that makes mistakes?)",
            )
        begin = job.world.rank * len(key_B)  # all ranks' batches are of one size
        loss_G = one.seen["denominator"].log() - one.seen["target_logit"]
        loss_B = loss_G[begin : begin + len(key_B)]
        for i in (~loss_B.isfinite()).nonzero().flatten().tolist():
            return Find((4, i), f"the loss of record {key_B[i]}, label {one.label_B[i]}: {loss_B[i]}")
    return None


# ---- backward


def _second_backward(job: Job, attempt: Attempt, largest: Largest) -> Find | None:
    """This rank's part of the gradient, which the sum over the ranks has taken the place of."""
    first: Find | None = None
    named = [(name, p) for name, p in reversed(list(job.backbone.named_parameters())) if p.requires_grad]
    with _like_before(job):
        for number, one in enumerate(attempt.passes):
            if one.feat_BD.grad is None:  # backward did not come so far, on no rank
                continue
            largest.setdefault("feature gradient", {})[str(number)] = _largest(one.feat_BD.grad)
            feat_BD = _features(job, attempt, number)
            given_BD = (one.feat_BD.grad * job.precision.loss_scale).to(feat_BD.dtype)
            grads = torch.autograd.grad(feat_BD, [p for _, p in named], given_BD, allow_unused=True)
            found = {name: g for (name, _), g in zip(named, grads, strict=True) if g is not None}
            largest["gradients of this rank"] = _largest_of(found)
            if first is None and not one.feat_BD.grad.isfinite().all():
                first = Find((5, number), f"the gradient of the features ({_amount(one.feat_BD.grad)})")
            for place, (name, g) in enumerate(found.items()):
                if first is None and not g.isfinite().all():
                    first = Find((6, place), f"the gradient of {name} ({_amount(g)})")
    return first


def _summed(job: Job, largest: Largest) -> Find | None:
    sums = {
        name: job.sync.gradient_of[p] for name, p in reversed(list(job.backbone.named_parameters())) if p.requires_grad
    }
    largest["summed gradients"] = _largest_of(sums)
    for place, (name, g) in enumerate(sums.items()):
        if not g.isfinite().all():
            return Find((7, place), f"the sum over the ranks of the gradient of {name} ({_amount(g)})")
    return None


def _features(job: Job, attempt: Attempt, number: int) -> Tensor:
    image_B3HW = attempt.batches[number].image_B3HW.to(job.device)
    with job.precision.autocast():
        return job.backbone(job.precision.as_input(normalise(image_B3HW)))


@contextmanager
def _like_before(job: Job) -> Iterator[None]:
    """The running statistics are afterwards what they were."""
    statistics = RunningStatistics(job.backbone)
    try:
        yield
    finally:
        statistics.restore()


# ---- words


def _largest(t: Tensor) -> dict[str, Any]:
    finite = t.isfinite()
    values = t[finite].abs()
    return {
        "largest": values.max().item() if values.numel() else None,
        "not_finite": t.numel() - int(finite.sum()),
    }


def _largest_of(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Of those with values that are not finite, then those with the largest."""
    found = {name: _largest(t.detach()) for name, t in tensors.items() if t.numel()}
    order = sorted(found, key=lambda name: (-found[name]["not_finite"], -(found[name]["largest"] or 0.0)))
    return {name: found[name] for name in order[:_MOST_NAMES]}


def _amount(t: Tensor) -> str:
    one = _largest(t)
    largest = "" if one["largest"] is None else f", the largest of the others {one['largest']:.3g}"
    return f"{one['not_finite']:,} of {t.numel():,} values{largest}"


def _all_finds(own: Find | None, world: World) -> list[Find | None]:
    """By rank."""
    text = b"" if own is None else json.dumps([*own.order, own.what[: _MOST_BYTES // 2]]).encode()
    line = torch.zeros(1, _MOST_BYTES, dtype=torch.uint8)
    line[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    finds: list[Find | None] = []
    for row in world.all_gather(line, name="train/non_finite"):
        words = bytes(row.tolist()).rstrip(b"\0")
        stage, place, what = json.loads(words) if words else (0, 0, "")
        finds.append(Find((stage, place), what) if words else None)
    return finds


def _in_words(finds: list[Find | None]) -> str:
    """All ranks say the same."""
    there = [(find.order, rank, find.what) for rank, find in enumerate(finds) if find]
    if not there:
        return "A second look at the same batch finds all finite (a memory or a processor that makes mistakes?)."
    order, rank, what = min(there)
    others = [str(other) for other_order, other, _ in there if other_order == order and other != rank]
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


def _write_down(job: Job, attempt: Attempt, symptom: str, own: Find | None, largest: Largest, folder: Path) -> str:
    """Returns what kept it from that: the disk's trouble must not hide this one."""
    lines = {
        "step": job.step + 1,
        "rank": job.world.rank,
        "symptom": symptom,
        "first_on_this_rank": own.what if own else None,
        "loss": _json_number(attempt.loss),
        "loss_scale": job.precision.loss_scale,
        "position": attempt.batches[-1].position,
        "micro_batches": [
            {
                "keys": batch.key_B.tolist(),
                "labels": batch.label_B.tolist(),
                "pixel_mean": [round(x, 2) for x in batch.image_B3HW.float().mean(dim=(1, 2, 3)).tolist()],
                "pixel_spread": [round(x, 2) for x in batch.image_B3HW.float().std(dim=(1, 2, 3)).tolist()],
            }
            for batch in attempt.batches
        ],
        "largest": largest,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{job.step + 1:08d}-rank-{job.world.rank:05d}.json"
        path.write_text(json.dumps(lines, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        return f"{error.strerror}: {folder}"
    return ""


def _json_number(x: float) -> float | str:
    """JSON has no NaN."""
    return x if math.isfinite(x) else str(x)
