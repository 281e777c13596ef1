"""The base of all compressors, and how the residuals of W ranks become those of another number of ranks."""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from partial_fc.comm import Work, World
from partial_fc.optim.compression.bucket import Bucket

# Yields the message that it waits for, is resumed with what arrived, and may start another.
Stages = Generator[Work, Tensor, None]


@dataclass(frozen=True)
class GradientScale:
    """The unit of the gradients of one update."""

    loss_scale: float = 1.0  # they are those of the loss times this
    global_batch: int | None = None  # they are the mean over so many images, accumulated ones included


class Compressor:
    """A way to sum buckets over the ranks. What it remembers of them (residuals) is for one GradientSync only."""

    kind: Literal["none", "fp16", "bf16", "2bit", "powersgd"]
    needs_global_batch = False

    def prepare(self, buckets: list[Bucket]) -> None:
        """Once, before anything runs. Raises ValueError where this kind cannot take a bucket's dtype."""

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        """From bucket.flat, this rank's gradient, to bucket.summed, the sum over the ranks without the loss scale. The
        same number of messages on all ranks. A value that is not finite on one rank is not finite on any after it."""
        raise NotImplementedError

    def undo(self) -> None:
        """Restores what was remembered before the last `run`: its update is not made."""

    def named(self) -> dict[str, Tensor]:
        """Returns what is remembered, as 'residual/<parameter>' (what this rank owes: every rank's is different) and
        'q/<parameter>' (equal on all ranks); not copies."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Returns copies of `named()`, for a checkpoint."""
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in self.named().items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave to this rank, or `merge_residuals`. Raises ValueError for another network's."""
        tensors = self.named()
        check_names(self.kind, state, tensors)
        for name, t in tensors.items():
            t.copy_(state[name])

    def reset(self) -> None:
        """Forgets all residuals, as before the first update."""
        for t in self.named().values():
            t.zero_()


def check_names(kind: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the state has the expected tensors, by name and shape."""
    for name in sorted(expected.keys() - state.keys()):
        raise ValueError(f"gradient compression {kind}: the state has no {name}; was it saved by another kind?")
    for name in sorted(state.keys() - expected.keys()):
        raise ValueError(
            f"gradient compression {kind}: the state's {name} belongs to nothing here; was it saved by another kind, "
            "or for another network?"
        )
    for name, t in expected.items():
        if state[name].shape != t.shape:
            raise ValueError(
                f"gradient compression {kind}: {name} has shape {tuple(state[name].shape)} in the state; "
                f"expected {tuple(t.shape)}: give the --compression-rank that it was saved with"
            )


def merge_residuals(states: Iterable[Mapping[str, Tensor]], num_ranks: int) -> dict[str, Tensor]:
    """Turns the states of all ranks that saved into the state of each of `num_ranks` ranks that go on.

    The sum of the residuals stays the same: each new one takes an equal part of the sum. (For the same number of
    ranks this is not needed: each loads its own.) states: one after the other, so that not all need be in memory.
    """
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for number, state in enumerate(states):
        if number and state.keys() != total.keys():
            raise ValueError(f"state {number} names other tensors than state 0: they are not of one run")
        for name, t in state.items():
            if name in total and t.shape != total[name].shape:
                raise ValueError(
                    f"state {number}: {name} has shape {tuple(t.shape)}, {tuple(total[name].shape)} before"
                )
            if name not in total:
                total[name], dtypes[name] = t.double(), t.dtype
            elif name.startswith("residual/"):
                total[name] = total[name] + t
    for name, t in total.items():
        total[name] = (t / num_ranks if name.startswith("residual/") else t).to(dtypes[name])
    return total
