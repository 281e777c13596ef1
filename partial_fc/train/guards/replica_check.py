"""Whether the replicas are still one: backbone and optimiser state are the same bits on all ranks, or should be.

A GPU or a memory that makes mistakes, a library that adds up in another order on one host, a rank that missed a
message: none of them need show in the loss, and from then on the ranks train different models.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from partial_fc.comm import World
from partial_fc.comm.watch.report import ranks_in_words


def check(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], step: int, last_equal: int, world: World) -> None:
    """Raises ValueError, on all ranks alike, where tensors or facts (as JSON has them), by name, differ between the
    ranks after update `step`: which ranks differ from the others, and in what first.

    last_equal: the step of the check before, which found them equal. A collective, of 8 bytes a rank; where the ranks
    differ two more, of 8 bytes a tensor. It costs a pass of zlib's CRC over the bytes and, from a GPU, their way to the
    host.
    """
    if world.size == 1:
        return
    digests = {name: zlib.crc32(json.dumps(fact, sort_keys=True).encode()) for name, fact in facts.items()}
    digests |= {name: _digest(t) for name, t in tensors.items()}
    whole = zlib.crc32(json.dumps(list(digests.items())).encode())
    whole_W = world.all_gather(torch.tensor([whole]), name="train/replicas").tolist()
    if len(set(whole_W)) == 1:
        return

    names = zlib.crc32(json.dumps(list(digests)).encode())
    names_W = world.all_gather(torch.tensor([names]), name="train/replicas/names").tolist()
    if len(set(names_W)) > 1:
        found = f"{_odd_ones(names_W)}: they do not even hold tensors of the same names"
    else:
        own = torch.tensor([list(digests.values())])
        rows_W = [tuple(row) for row in world.all_gather(own, name="train/replicas/digests").tolist()]
        differ = [name for name, column in zip(digests, zip(*rows_W, strict=True), strict=True) if _many(column)]
        found = (
            f"{_odd_ones(rows_W)}, in {len(differ)} of {len(digests)} parts of the state, the first of them {differ[0]}"
        )
    raise ValueError(
        f"step {step}: the replicas have parted: {found}. The ranks have been training different models since some "
        f"step after {last_equal}, where they were equal: go on from a checkpoint of step {last_equal} or before "
        "(--resume DIR). Usual causes: a GPU or memory that makes mistakes (look at its ECC counters, run without that "
        "host), hosts with different processors or versions of libraries. (--desync-every 0 looks no more)"
    )


def _digest(t: Tensor) -> int:
    # As bytes: numpy does not know bfloat16.
    return zlib.crc32(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _many(values: Iterable[Any]) -> bool:
    return len(set(values)) > 1


def _odd_ones(state_W: list[Any]) -> str:
    """Which ranks differ from most of them."""
    most, count = Counter(state_W).most_common(1)[0]
    if 2 * count <= len(state_W):
        kinds = [ranks_in_words([r for r, s in enumerate(state_W) if s == one]) for one in dict.fromkeys(state_W)]
        return f"{' and '.join(kinds)} differ, and neither is what most ranks have"
    odd = [rank for rank, state in enumerate(state_W) if state != most]
    return f"{ranks_in_words(odd)} differ{'s' if len(odd) == 1 else ''} from the other {count}"
