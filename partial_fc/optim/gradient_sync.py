"""The exchange of the backbone's gradients.

Scaling: the loss is the mean over the global batch, and the head gives each rank the exact gradient of its own rows. So
a rank's backbone gradient is its part of the whole; the parts are summed over the ranks, and nothing is divided.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partial_fc.comm import Work, World
from partial_fc.optim.compression import Compressor, GradientScale, build_compressor
from partial_fc.optim.compression.base import Stages, buckets_of

# Enough to saturate a link; a small network gets four smaller ones, which are sent during backward.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one update, on this rank."""

    gradient: int  # the gradients as stored: the bytes of compression "none"
    handed_in: float  # given to the collectives, on average; see `optim.compression` for a link's bytes


class GradientSync:
    """Sums gradients over the ranks, bucket by bucket, during backward.

        sync.zero()
        feat.backward(...)     # sends buckets as soon as they are full
        sync.wait()            # every p.grad now holds the sum over ranks

    Several backwards for one update: all but the last inside `with sync.hold()`.

    The gradients are stored in the buckets: p.grad are views. All ranks send buckets in one fixed order, that in which
    backward fills them: torch.distributed matches collectives by order. The compressor sums a bucket; one with several
    messages sends the later ones in `wait`.

    After `wait`, gradients have no loss scale. Those of float16 and bfloat16 parameters, which would underflow, are
    float32 and in `gradient_of` only: an optimizer must not use their p.grad.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
        world: World,
        bucket_bytes: int | None = None,
        compressor: Compressor | None = None,
        *,
        overlap: bool = True,
    ):
        """parameters: a module, or names and parameters in forward order; those without requires_grad are ignored.
        overlap: False, for measurements: sends no bucket before `wait`."""
        named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
        in_backward_order = [(name, p) for name, p in reversed(list(named)) if p.requires_grad]
        self._world = world
        self._overlap = overlap
        self._compressor = compressor or build_compressor("none")
        if bucket_bytes is None:
            bucket_bytes = min(BUCKET_BYTES, sum(p.nbytes for _, p in in_backward_order) // 4)
        self._buckets = buckets_of(in_backward_order, bucket_bytes)
        self._scale = GradientScale()
        self._under_way: list[tuple[Stages, Work | None]] = []  # of the sent buckets; None: done
        self._holding = False
        self._summed = False  # since zero()
        self._can_undo = False
        self._num_updates = 0
        self._bytes_handed_in = 0
        # Sum of each parameter's gradient after `wait`: p.grad, or a float32 tensor.
        self.gradient_of: dict[nn.Parameter, Tensor] = {}
        self._compressor.prepare(self._buckets)
        for number, bucket in enumerate(self._buckets):
            self.gradient_of.update(zip(bucket.parameters, bucket.views(bucket.summed), strict=True))
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(lambda p, number=number: self._arrived(p, number))

    def zero(self, loss_scale: float = 1.0, global_batch: int | None = None) -> None:
        """Zeroes all gradients, before the first backward of an update.

        loss_scale: the loss's factor. global_batch: the number of images in the loss's mean, over all ranks and
        backwards of this update; compression 2bit needs it.
        """
        if self._under_way:
            raise ValueError("zero() while gradients are on their way: call wait() first")
        if self._compressor.needs_global_batch and global_batch is None:
            raise ValueError(f"gradient compression {self._compressor.kind} needs zero(global_batch=)")
        self._scale = GradientScale(loss_scale, global_batch)
        self._summed = self._can_undo = False
        for bucket in self._buckets:
            bucket.attach()
            bucket.flat.zero_()
            bucket.num_missing = len(bucket.parameters)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the backwards inside only accumulate, without sending."""
        if self._under_way:
            raise ValueError("hold() after gradients have left: all backwards but an update's last belong inside")
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    @torch.no_grad()
    def wait(self) -> None:
        """Completes the exchange after backward. Parameters without a gradient count as 0."""
        if self._summed:
            raise ValueError("wait() twice without zero() between: gradients would be summed over the ranks again")
        self._start(len(self._buckets))
        # Stage by stage, in bucket order: the same on all ranks.
        while any(pending for _, pending in self._under_way):
            for number, (stages, pending) in enumerate(self._under_way):
                if pending is not None:
                    self._under_way[number] = (stages, self._next(stages, pending.wait()))
        self._under_way = []
        self._summed = self._can_undo = True
        self._num_updates += 1

    def undo(self) -> None:
        """Restores the compressor's memory, after `wait`, if the update is skipped (an overflow)."""
        if not self._can_undo:
            raise ValueError("undo() has one wait() to undo at most, and none was made since the last")
        self._compressor.undo()
        self._can_undo = False

    @property
    def may_overflow(self) -> bool:
        """Tells whether a finite gradient can become infinite in the exchange."""
        return self._compressor.kind == "fp16"

    def finite(self) -> Tensor:
        """Tells whether all summed gradients are finite: bool scalar, equal on all ranks if the sums are. One pass of a
        sum, which preserves NaN and Inf; checks every value only if that is not finite."""
        total = torch.stack([bucket.summed.sum() for bucket in self._buckets]).isfinite().all()
        if total:
            return total
        return torch.stack([bucket.summed.isfinite().all() for bucket in self._buckets]).all()

    def square_sum(self) -> Tensor:
        """Returns the sum of squares of the summed gradient: float64 scalar, equal on all ranks."""
        return torch.stack([bucket.summed.double().square().sum() for bucket in self._buckets]).sum()

    def scale(self, factor: float) -> None:
        """Multiplies all summed gradients."""
        for bucket in self._buckets:
            bucket.summed.mul_(factor)

    def state(self) -> dict[str, Tensor]:
        """Returns this rank's residuals, for a checkpoint (see `Compressor.state`, `compression.merge_residuals`)."""
        return self._compressor.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Loads the result of `state`. Raises ValueError for another network's or another compression's."""
        self._compressor.load_state(state)
        self._can_undo = False

    def reset(self) -> None:
        """Clears the compressor's memory, as at the start."""
        self._compressor.reset()
        self._can_undo = False

    def step_bytes(self) -> StepBytes:
        """Returns the bytes of an update, on average since the start."""
        gradient = sum(p.nbytes for p in self.gradient_of)
        return StepBytes(gradient, self._bytes_handed_in / max(1, self._num_updates))

    def _arrived(self, p: nn.Parameter, number: int) -> None:
        bucket = self._buckets[number]
        bucket.attach(p)
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
            bucket.attach()  # also of parameters without a gradient on this rank: their sum may not be 0
            stages = self._compressor.run(bucket, self._scale, self._world)
            self._under_way.append((stages, self._next(stages)))

    def _next(self, stages: Stages, arrived: Tensor | None = None) -> Work | None:
        """Starts a bucket's next message; None: its sum is complete."""
        before = self._world.traffic.num_bytes.total()
        try:
            return next(stages) if arrived is None else stages.send(arrived)
        except StopIteration:
            return None
        finally:
            self._bytes_handed_in += self._world.traffic.num_bytes.total() - before


@torch.no_grad()
def broadcast_module(module: nn.Module, world: World) -> None:
    """Broadcasts rank 0's parameters and buffers in one message, so that all ranks start equal."""
    tensors = [t.data for t in module.state_dict(keep_vars=True).values()]
    parts = [t.contiguous().flatten().view(torch.uint8) for t in tensors]
    arrived = world.broadcast(torch.cat(parts), name="backbone/start")
    for tensor, part in zip(tensors, arrived.split([len(part) for part in parts]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))
