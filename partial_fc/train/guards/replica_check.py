"""Whether the replicas are still one: backbone and optimiser state are the same bits on all ranks, or should be.

A GPU or a memory that makes mistakes, a library that adds up in another order on one host, a rank that missed a
message: none of them need show in the loss, and from then on the ranks train different models.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from partial_fc.checkpoint.consistency import compare_replicas
from partial_fc.comm import World


def check(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], step: int, last_equal: int, world: World) -> None:
    """Raises ValueError, on all ranks alike, where tensors or facts (as JSON has them), by name, differ between the
    ranks after update `step`: which ranks differ from the others, and in what first.

    last_equal: the step of the check before, which found them equal. A collective (consistency.compare_replicas).
    """
    found = compare_replicas({**facts, **tensors}, world, "train/replicas")
    if found is None:
        return
    raise ValueError(
        f"step {step}: the replicas have parted: {found}. The ranks have been training different models since some "
        f"step after {last_equal}, where they were equal: go on from a checkpoint of step {last_equal} or before "
        "(--resume DIR). Usual causes: a GPU or memory that makes mistakes (look at its ECC counters, run without that "
        "host), hosts with different processors or versions of libraries. (--desync-every 0 looks no more)"
    )
