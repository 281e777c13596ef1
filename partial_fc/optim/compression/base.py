"""Base class of compressors, those that send every value, and the merging of residuals for another number of ranks."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partial_fc.comm import Work, World

# Each parameter is aligned to this many values: its 2-bit codes fill whole words.
ALIGNMENT = 16


class Bucket:
    """Parameters of one dtype on one device. Their gradients, p.grad, are views into `flat`.

    A compressor leaves the sum over the ranks in `summed`: `flat` itself, but a separate float32 tensor for narrower
    parameters, since a sum without loss scale would underflow in float16. Padding between parameters is zero.
    """

    def __init__(self, number: int, named: list[tuple[str, nn.Parameter]]):
        self.number = number
        self.name = f"backbone/gradient_{number}"  # of its first message
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.num_missing = len(named)  # parameters without a gradient yet
        self._starts = []
        size = 0
        for p in self.parameters:
            p.grad = None
            self._starts.append(size)
            size += -(-p.numel() // ALIGNMENT) * ALIGNMENT
        self.flat = self.parameters[0].new_zeros(size)
        wide = torch.promote_types(self.flat.dtype, torch.float32)
        self.summed = self.flat if wide == self.flat.dtype else torch.zeros_like(self.flat, dtype=wide)
        self._view_of = dict(zip(self.parameters, self.views(self.flat), strict=True))
        self.attach()

    @torch.no_grad()
    def attach(self, *parameters: nn.Parameter) -> None:
        """Makes p.grad of these (default: all) parameters views into `flat` again after zero_grad() dropped them;
        copies values that autograd put elsewhere."""
        for p in parameters or self.parameters:
            view = self._view_of[p]
            if p.grad is view:
                continue
            if p.grad is None:
                view.zero_()
            else:
                view.copy_(p.grad)
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


# Yields a pending message, is resumed with the result, and may start another.
Stages = Generator[Work, Tensor, None]


@dataclass(frozen=True)
class GradientScale:
    """The unit of one update's gradients."""

    loss_scale: float = 1.0  # the loss was multiplied by this
    global_batch: int | None = None  # mean over so many images, accumulated ones included


class Compressor:
    """Sums buckets over the ranks. Its memory of them (residuals) belongs to one GradientSync."""

    kind: str
    needs_global_batch = False

    def prepare(self, buckets: list[Bucket]) -> None:
        """Called once, first. Raises ValueError if this kind does not support a bucket's dtype."""

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        """Sums bucket.flat, this rank's gradient, over the ranks into bucket.summed, without the loss scale. All ranks
        send the same number of messages. NaN or Inf on one rank becomes NaN or Inf on all."""
        raise NotImplementedError

    def undo(self) -> None:
        """Restores the memory before the last `run`, whose update is skipped."""

    def named(self) -> dict[str, Tensor]:
        """Returns the memory, not copied: 'residual/<parameter>' (what this rank has not sent yet; differs by rank) and
        'q/<parameter>' (equal on all ranks)."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Returns copies of `named()`, for a checkpoint."""
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in self.named().items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Loads this rank's `state`, or that of `merge_residuals`. Raises ValueError for another network's."""
        tensors = self.named()
        if state.keys() != tensors.keys():
            raise ValueError(
                f"gradient compression {self.kind}: the state has {sorted(state)}, expected {sorted(tensors)}; was it "
                "saved by another kind, or for another network?"
            )
        for name, t in tensors.items():
            if state[name].shape != t.shape:
                raise ValueError(
                    f"gradient compression {self.kind}: {name} has shape {tuple(state[name].shape)} in the state; "
                    f"expected {tuple(t.shape)}: give the --compression-rank that it was saved with"
                )
            t.copy_(state[name])

    def reset(self) -> None:
        """Clears all residuals, as before the first update."""
        for t in self.named().values():
            t.zero_()


class NoCompression(Compressor):
    """One all-reduce in the gradients' own dtype, in place."""

    kind = "none"

    def prepare(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.flat.dtype == torch.bfloat16:
                raise ValueError(
                    f"the gradient of {bucket.names[0]} is torch.bfloat16, which not every backend sums; use gradient "
                    "compression bf16, which adds up in float32"
                )

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        summed = yield world.start_all_reduce(bucket.flat, name=bucket.name, in_place=True)
        _put(bucket, summed, scale)


class Float16(Compressor):
    """One all-reduce in float16, like Horovod's `Compression.fp16`.

    The loss scale stays in during the exchange. A value or a sum beyond 65504 becomes infinity, see `finite()`. Without
    a loss scale, values below 3e-8 are lost.
    """

    kind = "fp16"

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        sent = bucket.flat.to(torch.float16)
        summed = yield world.start_all_reduce(sent, name=bucket.name, in_place=True)
        _put(bucket, summed, scale)


class BFloat16(Compressor):
    """Sends bfloat16 and sums in float32: no backend adds bfloat16, and 8 bits are too few for a sum.

    Every rank owns 1 / W of the bucket: it receives all ranks' gradients of that part, adds them, and sends the sum. As
    many bytes on a link as a 16-bit ring all-reduce.
    """

    kind = "bf16"

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        size = len(bucket.flat)
        block = -(-size // world.size)
        sent = bucket.flat.new_zeros(world.size * block, dtype=torch.bfloat16)
        sent[:size].copy_(bucket.flat)
        parts = yield world.start_all_to_all(sent, name=bucket.name)
        block_sum = parts.view(world.size, block).sum(0, dtype=torch.float32).bfloat16()
        summed = yield world.start_all_gather(block_sum, [block] * world.size, name=f"{bucket.name}/sum")
        _put(bucket, summed[:size], scale)


def _put(bucket: Bucket, summed: Tensor, scale: GradientScale) -> None:
    if bucket.summed is not summed:
        bucket.summed.copy_(summed)
    if scale.loss_scale != 1.0:
        bucket.summed.div_(scale.loss_scale)


def merge_residuals(states: Iterable[Mapping[str, Tensor]], num_ranks: int) -> dict[str, Tensor]:
    """Converts the states of all ranks that saved into the state of each of `num_ranks` ranks that resume: an equal
    part of the sum of the residuals. states: consumed one by one, to save memory."""
    states = iter(states)
    first = next(states, {})
    sums = {name: t.double() for name, t in first.items() if name.startswith("residual/")}
    for number, state in enumerate(states, 1):
        if state.keys() != first.keys():
            raise ValueError(f"state {number} names other tensors than state 0: they are not of one run")
        for name, t in state.items():
            if t.shape != first[name].shape:
                raise ValueError(
                    f"state {number}: {name} has shape {tuple(t.shape)}, {tuple(first[name].shape)} before"
                )
            if name in sums:
                sums[name] = sums[name] + t
    return {**first, **{name: (t / num_ranks).to(first[name].dtype) for name, t in sums.items()}}
