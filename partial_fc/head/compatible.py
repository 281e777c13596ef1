"""Backward-compatible training (Shen et al., 2020, https://arxiv.org/abs/2003.11942): the new embedding is also
classified by an older model's class centres, which stay as they are, so that it can be searched among old embeddings.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from partial_fc.head.partial_fc import PartialFC
from partial_fc.head.protocol import Head, Table


class Compatible(Head):
    """A head, and frozen centres of the same classes beside it: the loss is head(x) + weight * old(x's first numbers).

        head = Compatible(PartialFC(2_000_000, 512, world=world), PartialFC(2_000_000, 256, world=world, name="old"))

    old: of embeddings at most as wide; it has a name, under which checkpoints hold its centres. Its sampled classes
    change with the steps as the head's do; it has no gradient, so that clipping and guards see the head's alone.
    """

    def __init__(self, head: PartialFC, old: PartialFC, weight: float = 1.0) -> None:
        if old.embedding_size > head.embedding_size or old.num_classes != head.num_classes or not old.name:
            raise ValueError(
                f"{head.world}: the older head {old.name!r} takes {old.embedding_size} numbers for {old.num_classes} "
                f"classes, the new one {head.embedding_size} for {head.num_classes}; expected a name, at most as many "
                "numbers, and the same classes"
            )
        self.head, self.old, self.weight = head, old, weight
        self.num_classes, self.embedding_size = head.num_classes, head.embedding_size

    def __call__(self, out: Tensor, label_B: Tensor, **more: Any) -> Tensor:
        """out: (B, D), label_B: (B,) or (B, K). Raises as PartialFC. A collective."""
        loss = self.head(out, label_B, **more)
        return loss + self.weight * self.old(out[:, : self.old.embedding_size], label_B, **more)

    def prepare(self, label_B: Tensor) -> None:
        for each in (self.head, self.old):
            each.prepare(label_B)

    def finite(self) -> Tensor:
        return self.head.finite()

    def discard(self) -> None:
        for each in (self.head, self.old):
            each.discard()

    def gradient_square_sum(self) -> Tensor:
        return self.head.gradient_square_sum()

    def scale_gradient(self, factor: float) -> None:
        self.head.scale_gradient(factor)

    def step(self, lr: float) -> None:
        self.head.step(lr)
        self.old.forget()  # what is left of its step are the next one's negatives
        self.old.step(lr)

    @property
    def last_step(self) -> Any:
        return self.head.last_step

    def row_losses(self, last_step: Any, num_rows: int) -> Tensor:
        """Returns the losses of the new centres alone."""
        return self.head.row_losses(last_step, num_rows)

    def tables(self) -> Mapping[str, Table]:
        return {**self.head.tables(), **self.old.tables()}

    def state(self) -> dict[str, Any]:
        return {"compatible_weight": self.weight}

    def load(self, state: dict[str, Any]) -> None:
        """The weight is the run's own."""
