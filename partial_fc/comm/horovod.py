"""Collectives over Horovod (Gloo, MPI or NCCL, as built and launched).

Horovod matches collectives by name, in any order, and averages by default. Its differentiable functions are not used:
their backward averages again (gradients are divided in optim/gradient_sync.py).
"""

import math
import os
from collections.abc import Callable, Sequence

import horovod.torch as hvd
import torch
from torch import Tensor

from partial_fc.comm.launch.detect import Launch, StartError, devices_differ, expect, left_over, mpi_settings
from partial_fc.comm.world import Op, World, pad_rows

_LATER_S = 60.0  # from the watchdog's report to Gloo's timeout
_FOR_EVER_S = 1e6  # twelve days: Gloo counts milliseconds in 32 bits


class HorovodWorld(World):
    """The processes of horovodrun or mpirun."""

    backend = "horovod"

    def __init__(self, launch: Launch, device: str, comm_timeout_s: float = 0.0):
        """Raises ValueError if launcher and Horovod disagree, StartError if some ranks use GPUs and some the CPU."""
        if comm_timeout_s and not any(name.startswith("HOROVOD_STALL_") for name in os.environ):
            # Horovod's own warning, without step numbers, as a hint at half the watchdog's time.
            os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(max(60, math.ceil(comm_timeout_s / 2)))
        # Gloo's default timeout is 30 s; the watchdog is to report which ranks are missing.
        patience_s = comm_timeout_s + _LATER_S if comm_timeout_s else _FOR_EVER_S
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(patience_s)))
        if port := os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT"):
            expect(launch, "rendezvous of horovodrun", os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(port))
        chosen = mpi_settings(launch, len(os.sched_getaffinity(0)), os.environ)
        if chosen and launch.rank == 0:
            added = " ".join(f"{name}={value}" for name, value in chosen.items())
            print(f"{added}: a rank that waits leaves its core to the others\n", end="", flush=True)
        os.environ.update(chosen)
        hvd.init()
        if (hvd.rank(), hvd.size()) != (launch.rank, launch.size):
            raise ValueError(
                f"the launcher says rank {launch.rank} of {launch.size}, Horovod says {hvd.rank()} of {hvd.size()}: "
                "this Horovod was built without the controller that launched it; see `horovodrun --check-build`, and "
                "build it again (`make setup`)."
                f"{left_over(launch)}"
            )
        local = torch.tensor([device == "cuda"], dtype=torch.uint8)
        on_gpu_W = hvd.allgather(local, name="comm/devices").tolist()
        if problem := devices_differ(["cuda" if each else "cpu" for each in on_gpu_W]):
            raise StartError(f"{launch}: {problem}")
        super().__init__(launch)

    def _all_reduce(self, t: Tensor, op: Op, name: str) -> Callable[[], Tensor]:
        handle = hvd.allreduce_async_(t, name=name, op=hvd.Sum if op == "sum" else hvd.Max)
        return lambda: hvd.synchronize(handle)

    def _all_gather(self, t: Tensor, rows: Sequence[int] | None, name: str) -> Callable[[], Tensor]:
        handle = hvd.allgather_async(t, name=name)
        return lambda: hvd.synchronize(handle)

    def _reduce_scatter(self, t: Tensor, rows: Sequence[int], name: str) -> Callable[[], Tensor]:
        if t.is_cpu and hvd.gloo_enabled():
            return self._exchange_and_sum(t, rows, name)
        handle = hvd.reducescatter_async(pad_rows(t, rows), name=name, op=hvd.Sum)
        return lambda: hvd.synchronize(handle)[: rows[self.rank]]

    def _exchange_and_sum(self, t: Tensor, rows: Sequence[int], name: str) -> Callable[[], Tensor]:
        """An exchange and a local sum replace Gloo's reduce-scatter, which allocates and registers its buffers in each
        call: 64 KB over two ranks took 2.6 to 3.3 ms, and 0.7 to 2.7 this way, alternating (medians of 150)."""
        arrived = self._all_to_all(t, rows, (), name)

        def finish() -> Tensor:
            received = arrived()
            if not rows[self.rank]:
                return received
            total, *others = received.chunk(self.size)
            for other in others:
                total += other
            return total

        return finish

    def _all_to_all(self, t: Tensor, rows: Sequence[int], arriving: Sequence[int], name: str) -> Callable[[], Tensor]:
        handle = hvd.alltoall_async(t, torch.tensor(rows, dtype=torch.int32), name=name)
        return lambda: hvd.synchronize(handle)[0]  # [1]: how many rows each rank sent

    def _broadcast(self, t: Tensor, root: int, name: str) -> Callable[[], Tensor]:
        handle = hvd.broadcast_async(t, root, name=name)
        return lambda: hvd.synchronize(handle)

    def _leave(self) -> None:
        hvd.shutdown()
