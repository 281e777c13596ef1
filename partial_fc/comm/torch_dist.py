"""Collectives over torch.distributed (gloo, NCCL).

Here collectives are matched by their order, so every rank must start them in the same one; names are for people.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from partial_fc.comm.launch import Launch
from partial_fc.comm.world import Op, World, pad_rows


class TorchWorld(World):
    """The processes that torchrun started."""

    backend = "torch"

    def __init__(self, launch: Launch, device: str):
        # gloo stays beside NCCL for what lives on the host: barriers, counts, evaluation figures.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        super().__init__(launch)

    def _all_reduce(self, t: Tensor, op: Op, name: str) -> Callable[[], Tensor]:
        work = dist.all_reduce(t, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, async_op=True)
        return lambda: _finish(work, t)

    def _all_gather(self, t: Tensor, rows: Sequence[int] | None, name: str) -> Callable[[], Tensor]:
        if rows is None:
            # torch.distributed gathers only equal shapes, so the row counts travel first: 8 bytes a rank.
            count = torch.tensor([t.shape[0]], device=t.device)
            counts = torch.empty(self.size, dtype=torch.int64, device=t.device)
            dist.all_gather_single(counts, count)
            rows = counts.tolist()
        most = max(rows)
        if t.shape[0] < most:
            t = torch.cat((t, t.new_zeros(most - t.shape[0], *t.shape[1:])))
        gathered = t.new_empty(self.size * most, *t.shape[1:])
        work = dist.all_gather_single(gathered, t, async_op=True)

        def finish() -> Tensor:
            blocks = _finish(work, gathered)
            if min(rows) == most:
                return blocks
            return torch.cat([blocks[i * most : i * most + n] for i, n in enumerate(rows)])

        return finish

    def _reduce_scatter(self, t: Tensor, rows: Sequence[int], name: str) -> Callable[[], Tensor]:
        padded = pad_rows(t, rows)
        result = padded.new_empty(max(rows), *t.shape[1:])
        work = dist.reduce_scatter_single(result, padded, dist.ReduceOp.SUM, async_op=True)
        return lambda: _finish(work, result)[: rows[self.rank]]

    def _all_to_all(self, t: Tensor, name: str) -> Callable[[], Tensor]:
        result = torch.empty_like(t)
        work = dist.all_to_all_single(result, t, async_op=True)
        return lambda: _finish(work, result)

    def _broadcast(self, t: Tensor, root: int, name: str) -> Callable[[], Tensor]:
        result = t.clone()
        work = dist.broadcast(result, root, async_op=True)
        return lambda: _finish(work, result)

    def close(self) -> None:
        dist.destroy_process_group()


def _finish(work: dist.Work | None, result: Tensor) -> Tensor:
    if work is not None:
        work.wait()
    return result
