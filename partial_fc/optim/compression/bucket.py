"""Buckets: gradients that are exchanged together."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

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
