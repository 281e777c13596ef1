"""All ranks start from the same place, or none does: folders of one name on several hosts need not be the same."""

import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from partial_fc.checkpoint.folders import complete, step_of
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.comm import World


def newest_common(root: Path, world: World) -> Path | None:
    """The newest checkpoint below root that counts for all ranks, where each host has a root of its own, too; None: no
    rank has any. A collective. Raises ValueError, on all ranks, where some have checkpoints and there is none that all
    have, or where one cannot look there."""
    here: dict[int, Path] = {}
    problem = None
    try:
        here = {step_of(folder): folder for folder in complete(root)}
    except OSError as error:
        problem = error
    count_W = world.all_gather(torch.tensor([-1 if problem else len(here)]), name="checkpoint/num_found").tolist()
    if problem:
        raise ValueError(f"rank {world.rank} cannot look for checkpoints below {root}: {problem}") from problem
    if -1 in count_W:
        raise ValueError(f"rank {count_W.index(-1)} cannot look for checkpoints below {root}: its output says why")
    found = world.all_gather(torch.tensor(list(here), dtype=torch.int64), name="checkpoint/found")
    steps_W = [set(steps.tolist()) for steps in found.split(count_W)]
    common = set.intersection(*steps_W)
    if common:
        return here[max(common)]
    if not any(count_W):
        return None
    each = ", ".join(
        f"rank {rank} {'none' if not steps else 'step ' + ' '.join(map(str, sorted(steps)))}"
        for rank, steps in enumerate(steps_W)
    )
    raise ValueError(
        f"{world}: no checkpoint below {root} is there for all ranks: {each}. Give a --checkpoint-dir that all hosts "
        "see, bring the folders of the hosts that wrote them, or start anew with another --models-root"
    )


def open_checkpoint(folder: Path | None, world: World) -> Checkpoint | None:
    """The checkpoint in this rank's folder; None: it found none. Raises ValueError, on all ranks, where one cannot be
    read or their steps differ. A collective."""
    return agreed(
        lambda: Checkpoint(folder) if folder else None,
        "give another --checkpoint-dir or --resume, or start anew with another --models-root",
        world,
    )


def agreed(opened: Callable[[], Checkpoint | None], remedy: str, world: World) -> Checkpoint | None:
    """What this rank opens, once all have opened one of the same step, or none. Raises ValueError, on all ranks, where
    one cannot (ValueError, OSError) or their steps differ. A collective."""
    found, problem = None, None
    try:
        found = opened()
    except (ValueError, OSError) as error:
        problem = error
    step = -2 if problem else found.step if found else -1
    step_W = world.all_gather(torch.tensor([step]), name="checkpoint/step").tolist()
    if problem:
        raise ValueError(str(problem)) from problem
    if len(set(step_W)) > 1:
        seen = {-2: "cannot read its checkpoint", -1: "finds none"}
        each = ", ".join(f"rank {rank} {seen.get(s, f'step {s}')}" for rank, s in enumerate(step_W))
        raise ValueError(
            f"{world}: the ranks would not start from the same checkpoint: {each}. Checkpoints must lie where all "
            f"hosts see them, or on each host: {remedy}"
        )
    return found


def check_replicas(tensors: Iterable[Tensor], world: World) -> None:
    """Raises ValueError, on all ranks, where these (weights, optimiser state) differ between them. A collective."""
    digest = 0
    for t in tensors:
        as_bytes = t.detach().cpu().flatten().view(torch.uint8)
        digest = zlib.crc32(as_bytes.numpy().tobytes(), digest)
    digest_W = world.all_gather(torch.tensor([digest]), name="checkpoint/replicas").tolist()
    others = [str(rank) for rank, other in enumerate(digest_W) if other != digest_W[0]]
    if others:
        raise ValueError(
            f"rank(s) {', '.join(others)} start from other weights or momentum than rank 0: the files that they start "
            "from (--resume, --pretrained, --load-amp) are not the same on all hosts"
        )
