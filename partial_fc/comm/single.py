"""The world of one process: every collective is the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from partial_fc.comm.launch.detect import Launch
from partial_fc.comm.world import Op, World

if TYPE_CHECKING:
    from torch import Tensor


class SingleWorld(World):
    """A world of one process, without a launcher."""

    backend = "single"

    def __init__(self) -> None:
        super().__init__(Launch("single"))

    def _all_reduce(self, t: Tensor, op: Op, name: str) -> Callable[[], Tensor]:
        return lambda: t

    def _identity(self, t: Tensor, *args: Any, **kwargs: Any) -> Callable[[], Tensor]:
        return t.clone

    _all_gather = _reduce_scatter = _all_to_all = _identity

    def _broadcast(self, t: Tensor, root: int, name: str) -> Callable[[], Tensor]:
        if root != 0:
            raise ValueError(f"{name}: root {root} does not exist in a world of one process")
        return t.clone

    def _leave(self) -> None:
        pass
