"""The exchange of the backbone's gradients.

Scaling: the loss is the mean over the global batch, and the head gives each rank the exact gradient of its own rows. So
a rank's backbone gradient is its part of the whole; the parts are summed over the ranks, and nothing is divided.

    compression   bytes handed in for n fp32 values   the sum is that of
    none          4 n                                 the gradients
    fp16          2 n                                 the gradients rounded to float16, added up in float16
    bf16          2 n + 2 n / W                       the gradients rounded to bfloat16, added up in float32

A rank's link carries 2 (W - 1) / W times the message of an all-reduce; bf16, with its two messages, as much as fp16.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from partial_fc.comm import Work, World

Compression = Literal["none", "fp16", "bf16"]
_SENT_AS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}

# Enough to saturate a link; a small network gets four smaller ones, which are sent during backward.
BUCKET_BYTES = 4 << 20
LARGE_BYTES = 64 << 20  # of one process, which sends nothing: few operations, and little memory for gradients beside it
# Each parameter begins at a multiple of so many values of its bucket: a cache line of float32.
ALIGNMENT = 16
# Yields a pending message, is resumed with the result, and may start another.
Stages = Generator[Work, Tensor, None]


class Bucket:
    """Parameters of one dtype on one device. `take` copies their gradients into `flat`: then p.grad are views of it.

    `summed` holds their sum over the ranks: `flat` itself, but a separate float32 tensor for narrower parameters, since
    a sum without loss scale would underflow in float16. Padding between parameters is zero.
    """

    def __init__(self, number: int, named: list[tuple[str, nn.Parameter]]):
        self.name = f"backbone/gradient_{number}"  # of its first message
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.num_missing = len(named)  # parameters without a gradient yet
        self._starts = []
        size = 0
        for p in self.parameters:
            self._starts.append(size)
            size += -(-p.numel() // ALIGNMENT) * ALIGNMENT
        self.flat = self.parameters[0].new_zeros(size)
        wide = torch.promote_types(self.flat.dtype, torch.float32)
        self.summed = self.flat if wide == self.flat.dtype else torch.zeros_like(self.flat, dtype=wide)
        self._views = list(self.views(self.flat))

    def take(self) -> None:
        """Copies the gradients of this rank into `flat`, at once; of parameters without one, zeros."""
        found = {view: p.grad for p, view in zip(self.parameters, self._views, strict=True) if p.grad is not None}
        if len(found) < len(self.parameters):
            self.flat.zero_()
        if found:
            torch._foreach_copy_(list(found), list(found.values()))
        for p, view in zip(self.parameters, self._views, strict=True):
            p.grad = view

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Yields each parameter's part of a tensor laid out like `flat`, in the parameter's shape."""
        for p, start in zip(self.parameters, self._starts, strict=True):
            # In the parameter's memory layout (channels-last, say), or backward would have to transpose.
            yield flat[start:].as_strided(p.shape, p.stride(), flat.storage_offset() + start)


def buckets_of(named: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Sorts parameters, in the order in which backward reaches them, into buckets in the order in which they fill.

    One bucket per dtype and device is open at a time, so that layers of alternating dtypes share two buckets.
    """
    groups: list[list[tuple[int, str, nn.Parameter]]] = []
    opened: dict[tuple[torch.dtype, torch.device], list[tuple[int, str, nn.Parameter]]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for position, (name, p) in enumerate(named):
        key = (p.dtype, p.device)
        if key not in opened or p.nbytes > room[key]:
            opened[key] = []
            groups.append(opened[key])
            room[key] = bucket_bytes
        opened[key].append((position, name, p))
        room[key] -= p.nbytes
    groups.sort(key=lambda group: group[-1][0])
    return [Bucket(number, [(name, p) for _, name, p in group]) for number, group in enumerate(groups)]


class GradientSync:
    """Sums gradients over the ranks, bucket by bucket, during backward.

        sync.zero()
        feat.backward(...)     # sends buckets as soon as they are full
        sync.wait()            # every p.grad now holds the sum over ranks

    Several backwards for one update: all but the last inside `with sync.hold()`.

    Autograd makes each p.grad anew, so nothing is added to zeros; a full bucket copies its gradients in one operation.
    All ranks send buckets in the order in which backward fills them: torch.distributed matches collectives by order.
    bf16 sends a bucket's second message in `wait`.

    After `wait`, gradients have no loss scale. Those of float16 and bfloat16 parameters, which would underflow, are
    float32 and in `gradient_of` only: an optimizer must not use their p.grad.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
        world: World,
        bucket_bytes: int | None = None,
        compression: Compression = "none",
        *,
        overlap: bool = True,
    ):
        """parameters: a module, or names and parameters in forward order; those without requires_grad are ignored.
        overlap: False, for measurements: sends no bucket before `wait`."""
        named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
        in_backward_order = [(name, p) for name, p in reversed(list(named)) if p.requires_grad]
        self._world = world
        self._overlap = overlap
        self._sent_as = _SENT_AS[compression]
        if bucket_bytes is None:
            bucket_bytes = min(BUCKET_BYTES, sum(p.nbytes for _, p in in_backward_order) // 4)
            bucket_bytes = LARGE_BYTES if world.size == 1 else bucket_bytes
        self._buckets = buckets_of(in_backward_order, bucket_bytes)
        self._loss_scale = 1.0
        self._under_way: list[tuple[Stages, Work | None]] = []  # of the sent buckets; None: done
        self._holding = False
        self._summed = False  # since zero()
        # Sum of each parameter's gradient after `wait`: p.grad, or a float32 tensor.
        self.gradient_of: dict[nn.Parameter, Tensor] = {}
        for number, bucket in enumerate(self._buckets):
            self.gradient_of.update(zip(bucket.parameters, bucket.views(bucket.summed), strict=True))
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(lambda _p, number=number: self._arrived(number))

    def zero(self, loss_scale: float = 1.0) -> None:
        """Zeroes all gradients, before the first backward of an update. loss_scale: the loss's factor."""
        assert not self._under_way, "wait() comes first"
        self._loss_scale = loss_scale
        self._summed = False
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)
            for p in bucket.parameters:
                p.grad = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the backwards inside only accumulate, without sending."""
        assert not self._under_way, "all backwards but an update's last belong inside"
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    @torch.no_grad()
    def wait(self) -> None:
        """Completes the exchange after backward. Parameters without a gradient count as 0."""
        assert not self._summed, "zero() comes between"
        self._start(len(self._buckets))
        # Stage by stage, in bucket order: the same on all ranks.
        while any(pending for _, pending in self._under_way):
            for number, (stages, pending) in enumerate(self._under_way):
                if pending is not None:
                    self._under_way[number] = (stages, self._next(stages, pending.wait()))
        self._under_way = []
        self._summed = True

    @property
    def may_overflow(self) -> bool:
        """Tells whether a finite gradient can become infinite in the exchange."""
        return self._sent_as == torch.float16

    def sum(self) -> Tensor:
        """Returns the sum of all summed gradients' absolute values, a scalar. It is NaN or Inf if one of them is;
        otherwise only if it exceeds what its dtype holds."""
        return torch.stack(torch._foreach_norm([bucket.summed for bucket in self._buckets], 1)).sum()

    def finite(self) -> Tensor:
        """Tells whether all summed gradients are finite: bool scalar, equal on all ranks if the sums are."""
        return torch.stack([bucket.summed.isfinite().all() for bucket in self._buckets]).all()

    def square_sum(self) -> Tensor:
        """Returns the sum of squares of the summed gradient: float64 scalar, equal on all ranks."""
        norms = torch._foreach_norm([bucket.summed for bucket in self._buckets], 2, dtype=torch.float64)
        return torch.stack(norms).square().sum()

    def scale(self, factor: float) -> None:
        """Multiplies all summed gradients."""
        for bucket in self._buckets:
            bucket.summed.mul_(factor)

    def _arrived(self, number: int) -> None:
        bucket = self._buckets[number]
        if self._holding:
            return
        bucket.num_missing -= 1
        if number < len(self._under_way) or self._summed:
            raise ValueError(
                f"a gradient of {bucket.name} ({bucket.names[0]} and others) arrived after this bucket had left: call "
                "zero() before an update's first backward, and make all but its last inside hold()"
            )
        first = len(self._under_way)
        while first < len(self._buckets) and self._buckets[first].num_missing == 0:
            first += 1
        if self._overlap:
            self._start(first)

    @torch.no_grad()
    def _start(self, stop: int) -> None:
        """Sends the buckets up to `stop` that have not been sent yet."""
        for bucket in self._buckets[len(self._under_way) : stop]:
            bucket.take()
            stages = self._sum(bucket)
            self._under_way.append((stages, self._next(stages)))

    def _sum(self, bucket: Bucket) -> Stages:
        """Sums bucket.flat, this rank's gradient, over the ranks into bucket.summed, without the loss scale. NaN or Inf
        on one rank becomes NaN or Inf on all.

        float16 is sent like Horovod's `Compression.fp16`. The loss scale stays in during the exchange: a value or a sum
        beyond 65504 becomes infinity, see `finite()`; without a loss scale values below 3e-8 are lost. bfloat16 is
        summed in float32, as no backend adds it and 8 bits are too few for a sum: every rank receives all ranks'
        gradients of its 1 / W of the bucket, adds them, and sends the sum.
        """
        if self._sent_as == torch.bfloat16:
            size, num_ranks = len(bucket.flat), self._world.size
            block = -(-size // num_ranks)
            sent = bucket.flat.new_zeros(num_ranks * block, dtype=torch.bfloat16)
            sent[:size].copy_(bucket.flat)
            parts = yield self._world.start_all_to_all(sent, name=bucket.name)
            block_sum = parts.view(num_ranks, block).sum(0, dtype=torch.float32).bfloat16()
            name = f"{bucket.name}/sum"
            summed = (yield self._world.start_all_gather(block_sum, [block] * num_ranks, name=name))[:size]
        else:
            sent = bucket.flat.to(self._sent_as or bucket.flat.dtype)
            summed = yield self._world.start_all_reduce(sent, name=bucket.name, in_place=True)
        if bucket.summed is not summed:
            bucket.summed.copy_(summed)
        if self._loss_scale != 1.0:
            bucket.summed.div_(self._loss_scale)

    def _next(self, stages: Stages, arrived: Tensor | None = None) -> Work | None:
        """Starts a bucket's next message; None: its sum is complete."""
        try:
            return next(stages) if arrived is None else stages.send(arrived)
        except StopIteration:
            return None


@torch.no_grad()
def broadcast_module(module: nn.Module, world: World) -> None:
    """Broadcasts rank 0's parameters and buffers in one message, so that all ranks start equal."""
    tensors = [t.data for t in module.state_dict(keep_vars=True).values()]
    parts = [t.contiguous().flatten().view(torch.uint8) for t in tensors]
    arrived = world.broadcast(torch.cat(parts), name="backbone/start")
    for tensor, part in zip(tensors, arrived.split([len(part) for part in parts]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))
