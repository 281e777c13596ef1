"""The backbone's gradient exchange, overlapped with backward.

Who divides: the loss is the mean over the global batch, and the head hands each rank the exact gradient of its own
rows. So a rank's backbone gradient is its part of the whole, the parts are added up over the ranks, and nothing is
divided, here or later.
"""

import torch
from torch import Tensor, nn

from partial_fc.comm import Pending, World

# Enough for a link's bandwidth; a small network gets four smaller ones, so that they leave during backward.
BUCKET_BYTES = 4 << 20


class GradientSync:
    """Sums the gradients of a module over the ranks, bucket by bucket, while backward is still running.

        sync.zero()
        feat.backward(...)     # buckets leave as soon as they are full
        sync.wait()            # every p.grad now holds the sum over ranks

    The gradients live in the buckets (p.grad are views into them), so nothing is copied. Buckets leave in one fixed
    order, the reverse of the module's, on all ranks: torch.distributed matches collectives by order.
    """

    def __init__(self, module: nn.Module, world: World, bucket_bytes: int | None = None):
        self._world = world
        parameters = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        total_bytes = sum(p.numel() * p.element_size() for p in parameters)
        bucket_bytes = bucket_bytes or min(BUCKET_BYTES, total_bytes // 4)
        self._buckets = [_Bucket(group) for group in _grouped(parameters, bucket_bytes)]
        self._pending: list[Pending] = []
        for number, bucket in enumerate(self._buckets):
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))

    def zero(self) -> None:
        """Before backward: all gradients 0."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.num_missing = len(bucket.parameters)

    def wait(self) -> None:
        """After backward. Parameters that took no part in it count as gradient 0."""
        self._start(len(self._buckets))
        for pending in self._pending:
            pending.wait()
        self._pending = []

    def square_sum(self) -> Tensor:
        """Sum of squares of the summed gradient: float64 scalar, equal on all ranks."""
        return torch.stack([bucket.flat.double().square().sum() for bucket in self._buckets]).sum()

    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def _arrived(self, number: int) -> None:
        self._buckets[number].num_missing -= 1
        first = len(self._pending)
        while first < len(self._buckets) and self._buckets[first].num_missing == 0:
            first += 1
        self._start(first)

    def _start(self, stop: int) -> None:
        """Hands out buckets up to `stop` that have not left yet."""
        for number in range(len(self._pending), stop):
            flat = self._buckets[number].flat
            name = f"backbone/gradient_{number}"
            self._pending.append(self._world.start_all_reduce(flat, name=name, in_place=True))


class _Bucket:
    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        self.num_missing = len(parameters)
        for p, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            # In the parameter's own memory layout (channels-last, say), or backward would have to transpose.
            p.grad = part.as_strided(p.shape, p.stride(), part.storage_offset())


def _grouped(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = []
    room = 0
    for p in parameters:
        num_bytes = p.numel() * p.element_size()
        if (
            not groups
            or num_bytes > room
            or (p.dtype, p.device) != (groups[-1][0].dtype, groups[-1][0].device)
        ):
            groups.append([])
            room = bucket_bytes
        groups[-1].append(p)
        room -= num_bytes
    return groups


@torch.no_grad()
def broadcast_module(module: nn.Module, world: World) -> None:
    """Parameters and buffers of rank 0 to all ranks, as one message: they start equal whatever happened before."""
    tensors = [t.data for t in module.state_dict(keep_vars=True).values()]
    parts = [t.contiguous().flatten().view(torch.uint8) for t in tensors]
    arrived = world.broadcast(torch.cat(parts), name="backbone/start")
    for tensor, part in zip(tensors, arrived.split([len(part) for part in parts]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))


@torch.no_grad()
def average_batch_norm(module: nn.Module, world: World) -> None:
    """Running statistics of all ranks joined into those of the whole: the mean of means, and the mean variance plus
    the variance of the means. Each rank has seen other images; evaluation and checkpoints want one model."""
    if world.size == 1:
        return
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm) or not layer.track_running_stats:
            continue
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean, var = layer.running_mean.double(), layer.running_var.double()
        both = torch.stack((mean, var + mean.square()))
        mean, square = world.all_reduce(both, name=f"backbone/batch_norm/{name}") / world.size
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(square - mean.square())
