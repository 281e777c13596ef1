"""Collectives over torch.distributed (gloo, NCCL).

They are matched by their order, so all ranks must start them in the same one; names are for messages.
"""

import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from partial_fc.comm.launch import addresses, meet_ranks
from partial_fc.comm.launch.detect import Launch, StartError
from partial_fc.comm.watch.board import Endpoint
from partial_fc.comm.world import Op, World, pad_rows

# torch.distributed's timeout is longer than the watchdog's, whose report says more.
_LATER_S = 60.0
_FOR_EVER = timedelta(days=3650)
LOST_AFTER_S = 30
# Dtypes that reach a backend (world.py turns the others into bytes).
_ON_THE_WIRE = (torch.uint8, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)

# Their names before torch 2.13 are deprecated since.
_is_new = hasattr(dist, "all_gather_single")
_all_gather_single = dist.all_gather_single if _is_new else dist.all_gather_into_tensor
_reduce_scatter_single = dist.reduce_scatter_single if _is_new else dist.reduce_scatter_tensor


class TorchWorld(World):
    """The processes of torchrun, srun or our own command."""

    backend = "torch"
    asks_for_counts = True
    _group: dist.ProcessGroup | None = None  # None: all processes

    def __init__(self, launch: Launch, device: str, comm_timeout_s: float, start_timeout_s: float):
        """Raises StartError if ranks do not find each other, or some use GPUs and some the CPU."""
        self._meeting = meet_ranks.meet(launch, start_timeout_s, device)
        if launch.local_size == launch.size and not os.environ.get("GLOO_SOCKET_IFNAME"):
            # Gloo's default is the address of the host's name, which other hosts may not reach.
            os.environ["GLOO_SOCKET_IFNAME"] = addresses.loopback()
        try:
            dist.init_process_group(
                # gloo stays beside NCCL for tensors on the host: barriers, counts, evaluation scores.
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=self._meeting.keys,
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=start_timeout_s),
            )
        except RuntimeError as error:
            chosen = os.environ.get("GLOO_SOCKET_IFNAME", "chosen by the host's name")
            raise StartError(
                f"{launch}: all ranks have come, but cannot reach each other (network interface: {chosen}): "
                f"{str(error).splitlines()[0]}. --network-interface NAME chooses the network that all hosts share (`ip "
                "addr` lists them)"
            ) from error
        # Until here it was the timeout of the connection, from now on that of a collective.
        timeout = timedelta(seconds=comm_timeout_s + _LATER_S) if comm_timeout_s else _FOR_EVER
        dist.distributed_c10d._set_pg_timeout(timeout)
        _notice_lost_hosts()
        super().__init__(launch)

    def _store(self, network_interface: str | None) -> Endpoint:
        server = self._meeting.server
        return Endpoint([server.host], server.port, self._meeting.attempt)

    def _all_reduce(self, t: Tensor, op: Op, name: str) -> Callable[[], Tensor]:
        work = dist.all_reduce(t, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, self._group, async_op=True)
        return lambda: _finish(work, t)

    def _all_gather(self, t: Tensor, rows: Sequence[int] | None, name: str) -> Callable[[], Tensor]:
        if rows is None:
            rows = self._row_counts(t)
        most = max(rows)
        if t.shape[0] < most:
            t = torch.cat((t, t.new_zeros(most - t.shape[0], *t.shape[1:])))
        gathered = t.new_empty(self.size * most, *t.shape[1:])
        work = _all_gather_single(gathered, t, self._group, async_op=True)

        def finish() -> Tensor:
            blocks = _finish(work, gathered)
            if min(rows) == most:
                return blocks
            return torch.cat([blocks[i * most : i * most + n] for i, n in enumerate(rows)])

        return finish

    def _row_counts(self, t: Tensor) -> list[int]:
        """Returns all ranks' row counts. torch.distributed gathers only equal shapes, so counts, dtype and row shape
        are exchanged first, 24 bytes a rank; ranks whose rows differ would misread each other's bytes."""
        mine = [t.shape[0], math.prod(t.shape[1:]), _ON_THE_WIRE.index(t.dtype)]
        found = torch.empty(self.size, len(mine), dtype=torch.int64, device=t.device)
        _all_gather_single(found, torch.tensor([mine], device=t.device), self._group)
        counts, *what = found.t().tolist()
        rows = list(zip(*what, strict=True))
        if len(set(rows)) > 1:
            words = [f"rank {rank}: {n} of {_ON_THE_WIRE[dtype]}" for rank, (n, dtype) in enumerate(rows)]
            raise RuntimeError(f"the ranks' rows have other widths or dtypes ({', '.join(words)}); they must be alike")
        return counts

    def _reduce_scatter(self, t: Tensor, rows: Sequence[int], name: str) -> Callable[[], Tensor]:
        padded = pad_rows(t, rows)
        result = padded.new_empty(max(rows), *t.shape[1:])
        work = _reduce_scatter_single(result, padded, dist.ReduceOp.SUM, self._group, async_op=True)
        return lambda: _finish(work, result)[: rows[self.rank]]

    def _all_to_all(self, t: Tensor, rows: Sequence[int], arriving: Sequence[int], name: str) -> Callable[[], Tensor]:
        result = t.new_empty(sum(arriving), *t.shape[1:])
        work = dist.all_to_all_single(result, t, list(arriving), list(rows), self._group, async_op=True)
        return lambda: _finish(work, result)

    def _broadcast(self, t: Tensor, root: int, name: str) -> Callable[[], Tensor]:
        result = t.clone()
        work = dist.broadcast(result, group=self._group, group_src=root, async_op=True)
        return lambda: _finish(work, result)

    def _leave(self) -> None:
        dist.destroy_process_group()


class GroupWorld(TorchWorld):
    """The ranks of a process group that the caller makes and destroys."""

    def __init__(self, group: dist.ProcessGroup | None):
        if not dist.is_initialized():
            raise ValueError("no process group: call torch.distributed.init_process_group first, or use comm.init")
        self._group = group
        World.__init__(self, Launch("torch", dist.get_rank(group), dist.get_world_size(group)))

    def _store(self, network_interface: str | None) -> Endpoint:
        return World._store(self, network_interface)

    def _leave(self) -> None:
        pass


def _notice_lost_hosts() -> None:
    """Has this process's connections to other hosts, Gloo's and the store's, fail when the other host's kernel has not
    answered for LOST_AFTER_S: its collectives then fail, too. The kernel of a stopped or busy process answers."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:  # OSError: it is none
            if connection.getpeername()[0] in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, LOST_AFTER_S // 6)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_AFTER_S)


def _finish(work: dist.Work | None, result: Tensor) -> Tensor:
    if work is not None:
        work.wait()
    return result
