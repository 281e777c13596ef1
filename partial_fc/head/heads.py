"""Heads: several PartialFC on the same features, where each row belongs to one of them by its label."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partial_fc.comm import World
from partial_fc.head.partial_fc import PartialFC
from partial_fc.head.protocol import is_table_name
from partial_fc.head.selection.batches import class_numbers


class _Part(NamedTuple):
    """The rows of one head in a forward pass. row_b: of this rank's batch. before: rows of lower ranks."""

    name: str
    row_b: Tensor
    before: int
    seen: dict[str, Tensor]  # the head's last_step


class Heads(nn.Module, AbstractContextManager["Heads"]):
    """Several heads, such as one for each data set; each row belongs to one of them.

        heads = Heads(image=PartialFC(2_000_000, 512, "cosface", 0.1, world, name="image"),
                      words=PartialFC(365_187, 512, "cosface", world=world, name="words"), weights={"words": 0.5})
        loss = heads(feat_BD, label_B)      # label_B: heads.first_class["words"] + a class of `words`
        loss.backward()
        heads.step(lr)

    Class numbers of a head begin behind those of the head before it, in the order of the arguments. The loss is the sum
    over the heads of weight * (mean over the head's rows of the global batch), and so are the gradients. A rank may
    have no rows of a head in a step; a head of which no rank has rows is left as it is, and its schedules and negatives
    go on with the step. One collective besides those of the heads, heads/rows, of 16 bytes a head and rank.

    weights: by name, finite and not negative; 1 if not given. lr_ratios: what `step` multiplies lr by, by name.
    num_labels: by name, the most labels of a head's rows, if fewer than K: the columns of label_BK after those hold
    its ignore_index.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        lr_ratios: Mapping[str, float] | None = None,
        num_labels: Mapping[str, int] | None = None,
        **heads: Any,
    ) -> None:
        super().__init__()
        if not heads:
            raise ValueError("Heads() has no head; expected NAME=PartialFC(..., name=NAME)")
        for name, head in heads.items():
            if not isinstance(head, PartialFC):
                raise ValueError(f"head {name!r} is a {type(head).__name__}; expected a PartialFC")
            if head.name != name or not is_table_name(name):
                raise ValueError(
                    f"head {name!r} has the name {head.name!r}, which its files and collectives carry: make it with "
                    f"PartialFC(..., name={name!r})"
                )
        first: PartialFC = next(iter(heads.values()))
        for name, head in heads.items():
            ranks = (head.world.rank, head.world.size) == (first.world.rank, first.world.size)
            if head.embedding_size != first.embedding_size or not ranks:
                raise ValueError(
                    f"head {name!r} takes {head.embedding_size} numbers a row of {head.world}, head {first.name!r} "
                    f"{first.embedding_size} of {first.world}; expected the same features and ranks for all"
                )
        self.embedding_size = first.embedding_size
        self.parts = nn.ModuleDict(heads)
        self.weights = _by_name("weights", weights, heads)
        self.lr_ratios = _by_name("lr_ratios", lr_ratios, heads)
        self.num_labels = {name: int(number) for name, number in _by_name("num_labels", num_labels, heads, 0).items()}
        stops = list(accumulate(head.num_classes for head in heads.values()))
        self.num_classes = stops[-1]
        self.first_class = dict(zip(heads, [0, *stops], strict=False))
        self._stop_H = torch.tensor(stops)
        self.last_step: list[_Part] = []

    @property
    def world(self) -> World:
        return self._each()[0][1].world

    def forward(
        self, feat_BD: Tensor, label_B: Tensor, weight_BK: Tensor | None = None, row_weight_B: Tensor | None = None
    ) -> Tensor:
        """Returns the loss: float32 or wider scalar, equal on all ranks. feat_BD: floating (B, D). label_B: integers,
        (B,) or, with several labels a row of the same head, (B, K); a head's ignore_index fills rows that have fewer.
        weight_BK, row_weight_B: of labels and rows, see PartialFC. Raises ValueError for a label of no head, and one of
        another head than the row's first label. A collective."""
        label_B = self._checked(feat_BD, label_B)
        self.last_step = []
        loss = feat_BD.new_zeros((), dtype=torch.promote_types(feat_BD.dtype, torch.float32))
        for name, row_b, before, head in self._rows(label_B):
            label_b = label_B[row_b]
            weight_b, row_weight_b = (
                None if given is None else given[row_b.to(given.device)] for given in (weight_BK, row_weight_B)
            )
            if label_B.ndim == 2 and (number := self.num_labels[name]):
                label_b, weight_b = label_b[:, :number], None if weight_b is None else weight_b[:, :number]
            part = head(feat_BD[row_b], self._own(head, label_b), weight_b, row_weight_b)
            loss = loss + self.weights[name] * part
            self.last_step.append(_Part(name, row_b, before, head.last_step))
        return loss

    def prepare(self, label_B: Tensor) -> None:
        """Announces the labels of all micro-batches of a step, as PartialFC.prepare. Means are those of each
        micro-batch, so with other numbers of rows of a head in each of them the loss is not that of one batch."""
        label_B = class_numbers(label_B)
        for _, row_b, _, head in self._rows(label_B):
            head.prepare(self._own(head, label_B[row_b]))

    def _checked(self, feat_BD: Tensor, label_B: Tensor) -> Tensor:
        label_B = class_numbers(label_B)
        if feat_BD.ndim != 2 or label_B.ndim not in (1, 2) or len(label_B) != len(feat_BD):
            raise ValueError(
                f"{self.world}: features {tuple(feat_BD.shape)} with labels {tuple(label_B.shape)}; expected (B, "
                f"{self.embedding_size}) with (B,) or (B, K)"
            )
        return label_B

    def _head_of(self, label_B: Tensor) -> Tensor:
        """Returns the number of each row's head, by its largest label: what fills rows is negative; -1 for a row of
        nothing else. A label of no head counts for the last or the first, which refuses it."""
        largest_B = label_B.amax(dim=1) if label_B.ndim == 2 else label_B
        stop_H = self._stop_H.to(label_B.device)
        head_B = torch.bucketize(largest_B, stop_H, right=True).clamp_(max=len(stop_H) - 1)
        fills = [head.ignore_index for _, head in self._each() if (head.ignore_index or 0) < 0]
        return head_B.masked_fill_(torch.isin(largest_B, largest_B.new_tensor(fills)), -1)

    def _rows(self, label_B: Tensor) -> list[tuple[str, Tensor, int, PartialFC]]:
        """Returns (name, this rank's rows, rows of lower ranks, head) of each head that any rank has rows of. Raises
        ValueError, on all ranks, if no row has a label, or a rank has rows with more labels than num_labels."""
        for _, head in self._each():
            head.join_processes()
        head_B = self._head_of(label_B)
        row_Hb = [(head_B == number).nonzero()[:, 0] for number in range(len(self.parts))]
        wide_H = [self._num_wide(head, label_B[row_b]) for (_, head), row_b in zip(self._each(), row_Hb, strict=True)]
        counts_12H = torch.tensor([[[len(row_b) for row_b in row_Hb], wide_H]])
        count_WH, wide_WH = self.world.all_gather(counts_12H, name="heads/rows").unbind(dim=1)
        for name, wide_W in zip(self.parts, wide_WH.unbind(dim=1), strict=True):
            if wide_W.any():
                raise ValueError(
                    f"{self.world}: rows of head {name!r} have more than {self.num_labels[name]} labels (num_labels): "
                    + ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(wide_W.tolist()) if count)
                )
        before_H, total_H = count_WH[: self.world.rank].sum(dim=0).tolist(), count_WH.sum(dim=0).tolist()
        if not any(total_H):
            raise ValueError(f"{self.world}: the global batch is empty: no rank brought a row with a label")
        parts = zip(self._each(), row_Hb, before_H, total_H, strict=True)
        return [(name, row_b, before, head) for (name, head), row_b, before, total in parts if total]

    def _num_wide(self, head: PartialFC, label_b: Tensor) -> int:
        """Returns how many rows have more labels than num_labels; without an ignore_index all that are as wide."""
        number = self.num_labels[head.name]
        if label_b.ndim == 1 or not 0 < number < label_b.shape[1]:
            return 0
        if head.ignore_index is None:
            return len(label_b)
        return int((label_b[:, number:] != head.ignore_index).any(dim=1).sum())

    def _own(self, head: PartialFC, label_b: Tensor) -> Tensor:
        """Returns the labels as class numbers of the head; ignore_index stays."""
        own_b = label_b - self.first_class[head.name]
        if head.ignore_index is None:
            return own_b
        return torch.where(label_b == head.ignore_index, label_b, own_b)

    def _each(self) -> list[tuple[str, PartialFC]]:
        return [(name, head) for name, head in self.parts.items()]  # type: ignore[misc]

    # ---- as partial_fc.head.Head has it

    def finite(self) -> Tensor:
        """Returns whether this rank's pending gradient has neither NaN nor Inf: bool scalar."""
        return torch.stack([head.finite() for _, head in self._each()]).all()

    def discard(self) -> None:
        """Discards the pending gradient: the step is skipped."""
        for _, head in self._each():
            head.discard()

    def gradient_square_sum(self) -> Tensor:
        """Returns the sum of squares of the pending gradient over all ranks and heads: float64 scalar."""
        return torch.stack([head.gradient_square_sum() for _, head in self._each()]).sum()

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the pending gradient."""
        for _, head in self._each():
            head.scale_gradient(factor)

    def step(self, lr: float) -> None:
        """Updates the centres, each head's with lr times its ratio."""
        for name, head in self._each():
            head.step(lr * self.lr_ratios[name])

    def row_losses(self, last_step: list[_Part], num_rows: int) -> Tensor:
        """Returns the losses of this rank's num_rows rows in the forward pass that set this `last_step`, each without
        its head's weight."""
        loss_B = torch.zeros(num_rows, dtype=torch.float64, device=self._each()[0][1].store.device)
        for name, row_b, before, seen in last_step:
            head: PartialFC = self.parts[name]  # type: ignore[assignment]
            loss_B[row_b] = head.row_losses(seen, len(row_b), before).double()
        return loss_B

    def tables(self) -> dict[str, PartialFC]:
        """Returns the heads by name."""
        return dict(self._each())

    def state(self) -> dict[str, Any]:
        """Returns the class numbers of the heads: {"first_class": {name: first}}."""
        return {"first_class": self.first_class}

    def load(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is of heads with other class numbers."""
        if state.get("first_class") != self.first_class:
            raise ValueError(
                f"the checkpoint's heads begin at classes {json.dumps(state.get('first_class'))}, these at "
                f"{json.dumps(self.first_class)}: give the same sets in the same order"
            )

    def close(self) -> None:
        """Stops the heads' threads. `with heads:` calls it."""
        for _, head in self._each():
            head.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _by_name(
    what: str, given: Mapping[str, float] | None, heads: Mapping[str, Any], default: float = 1.0
) -> dict[str, float]:
    """Returns a number for each head. Raises ValueError for another name or a wrong number."""
    for name, value in (given or {}).items():
        if name not in heads:
            raise ValueError(f"{what} name a head {name!r}; there are {', '.join(map(repr, heads))}")
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{what}: {value} for {name!r}; expected a finite number, 0 or more")
    return {name: float((given or {}).get(name, default)) for name in heads}
