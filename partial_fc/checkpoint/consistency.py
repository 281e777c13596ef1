"""Agreement of all ranks, on the checkpoint to start from (hosts may have different ones) and on replicated state."""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partial_fc.checkpoint.folders import complete, step_of
from partial_fc.checkpoint.read import Checkpoint, open_with_centres
from partial_fc.comm import World, all_gather_json, all_or_raise
from partial_fc.comm.watch.report import ranks_in_words


def common(root: Path, world: World, after: int = -1, needed: bool = True) -> dict[int, Path]:
    """Returns the complete checkpoints below root with more steps than `after` that all ranks have: this rank's folders
    by rising step. A collective. Raises ValueError, on all ranks, if one cannot read its root, or, if `needed`, if some
    ranks have checkpoints but none is common to all."""

    def find() -> dict[int, Path]:
        return {step: folder for folder in complete(root) if (step := step_of(folder)) > after}

    folders = all_or_raise(find, world, "checkpoint/readable", f" cannot look for checkpoints below {root}")
    steps_W = all_gather_json(list(folders), world, "checkpoint/found")
    of_all = set.intersection(*map(set, steps_W))
    if of_all or not needed or not any(steps_W):
        return {step: folders[step] for step in sorted(of_all)}
    each = ", ".join(
        f"rank {rank} {'step ' + ' '.join(map(str, steps)) if steps else 'none'}" for rank, steps in enumerate(steps_W)
    )
    raise ValueError(
        f"{world}: no checkpoint below {root} is there for all ranks: {each}. Give a --checkpoint-dir that all hosts "
        "see, bring the folders of the hosts that wrote them, or start from scratch with another --models-root"
    )


def newest_common(root: Path, world: World) -> Path | None:
    """Returns the newest of `common`; None if no rank has any."""
    return next(reversed(common(root, world).values()), None)


def open_checkpoint(folder: Path | None, world: World) -> Checkpoint | None:
    """Opens the checkpoint in this rank's folder, if all that it reads is valid; None if there is none. Raises
    ValueError, on all ranks, if one cannot be read or their steps differ. A collective."""

    def opened() -> Checkpoint | None:
        found = Checkpoint(folder) if folder else None
        if found:
            found.check_share(world.rank, world.size)
        return found

    remedy = "give another --checkpoint-dir or --resume, or start from scratch with another --models-root"
    return same_checkpoint(opened, remedy, world)


def open_centres(folder: Path, world: World) -> Checkpoint:
    """Opens a checkpoint that has a head. folder: the checkpoint, or a folder of which it is the newest. Raises
    ValueError, on all ranks, if one finds none, or their steps differ. A collective."""

    def opened() -> Checkpoint:
        found = open_with_centres(folder, named=True)
        found.check_rows(world.rank, world.size)
        return found

    checkpoint = same_checkpoint(opened, "give --start-centres the folder of one step", world)
    assert checkpoint is not None
    return checkpoint


def same_checkpoint(opened: Callable[[], Checkpoint | None], remedy: str, world: World) -> Checkpoint | None:
    """Returns the checkpoint that this rank opens, once all have opened one of the same step, or none. Raises
    ValueError, on all ranks, if opening fails on one (ValueError, OSError) or their steps differ. A collective."""
    checkpoint = all_or_raise(opened, world, "checkpoint/opened", " cannot read its checkpoint")
    finds_W = all_gather_json(f"step {checkpoint.step}" if checkpoint else "finds none", world, "checkpoint/step")
    if len(set(finds_W)) > 1:
        each = ", ".join(f"rank {rank} {finds}" for rank, finds in enumerate(finds_W))
        raise ValueError(
            f"{world}: the ranks would not start from the same checkpoint: {each}. Checkpoints must lie where all "
            f"hosts see them, or on each host: {remedy}"
        )
    return checkpoint


def check_replicas(state: Mapping[str, Tensor], world: World) -> None:
    """Raises ValueError, on all ranks, if this state (weights, optimizer) differs between them. A collective."""
    difference = compare_replicas(state, world, "checkpoint/replicas")
    if difference:
        raise ValueError(
            f"not all ranks start from the same weights or momentum: {difference}. The files that they start from "
            "(--resume, --pretrained, --load-amp) are not the same on all hosts"
        )


def compare_replicas(state: Mapping[str, Any], world: World, name: str) -> str | None:
    """Returns which ranks hold other values than the others, and the first difference; None if all hold the same bits.

    state: tensors, and values as JSON has them, by name. A collective of 8 bytes a rank; if they differ, another one of
    names and sums. It costs a CRC of all bytes and, from a GPU, their copy to the host.
    """
    if world.size == 1:
        return None
    digests = {key: _digest(value) for key, value in state.items()}
    total_W = world.all_gather(torch.tensor([_digest(list(digests.items()))]), name=name).tolist()
    if len(set(total_W)) == 1:
        return None
    digests_W = all_gather_json(digests, world, f"{name}/digests")
    names_W = [tuple(each) for each in digests_W]
    if len(set(names_W)) > 1:
        return f"{_odd_ranks(names_W)}: they do not even hold tensors of the same names"
    differ = [key for key in digests if len({each[key] for each in digests_W}) > 1]
    odd = _odd_ranks([tuple(each.values()) for each in digests_W])
    return f"{odd}, in {len(differ)} of {len(digests)} parts of the state, the first of them {differ[0]}"


def _digest(value: Any) -> int:
    if not isinstance(value, Tensor):
        return zlib.crc32(json.dumps(value, sort_keys=True).encode())
    # As bytes: numpy has no bfloat16.
    return zlib.crc32(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _odd_ranks(state_W: list[Any]) -> str:
    """Describes which ranks differ from most of them."""
    most, count = Counter(state_W).most_common(1)[0]
    if 2 * count <= len(state_W):
        kinds = [ranks_in_words([r for r, s in enumerate(state_W) if s == one]) for one in dict.fromkeys(state_W)]
        return f"{' and '.join(kinds)} differ, and neither is what most ranks have"
    odd = [rank for rank, state in enumerate(state_W) if state != most]
    return f"{ranks_in_words(odd)} differ{'s' if len(odd) == 1 else ''} from the other {count}"
