"""Gathers the ranks' batches, checks their labels and fetches the active rows of the step."""

from typing import Any

import torch
from torch import Tensor

from partial_fc.comm import World
from partial_fc.head.gather import Arrived, Gather, GlobalBatch
from partial_fc.head.selection.active_rows import ActiveRows, RowSelector


class Batches:
    """Gathers and checks the batches of a step and fetches its rows. The host waits for the device here, once, and
    nowhere else in a step."""

    def __init__(self, num_classes: int, world: World, selector: RowSelector, scope: str = "head"):
        """scope: what the names of the collectives begin with."""
        self._gather = Gather(num_classes, world, f"{scope}/gather")
        self._gather_labels = Gather(num_classes, world, f"{scope}/labels")
        self._selector = selector
        # Of this step's micro-batches: their active rows, and their labels, ascending.
        self._prepared: tuple[ActiveRows, Tensor] | None = None

    def look(
        self,
        feat_BD: Tensor,
        label_B: Tensor,
        weight_BT: Tensor | None,
        row_weight_B: Tensor | None,
        training: bool,
        step: int,
    ) -> tuple[GlobalBatch, ActiveRows]:
        """Returns the global batch and its active rows; after `prepare` these are the rows of all micro-batches."""
        return self._look(self._gather, step, feat_BD, label_B, training, weight_BT, row_weight_B)

    def prepare(self, label_B: Tensor, step: int) -> None:
        """Chooses and fetches the rows of a step of several micro-batches. label_B: this rank's labels of all of
        them."""
        no_feature_B0 = torch.empty(len(label_B), 0, dtype=torch.uint8, device=label_B.device)
        self.forget()
        batch, active = self._look(self._gather_labels, step, no_feature_B0, label_B)
        self._prepared = active, batch.label_G.sort().values

    @property
    def are_prepared(self) -> bool:
        """Whether the labels of the step's micro-batches are known."""
        return self._prepared is not None

    def forget(self) -> None:
        """Drops what `prepare` chose."""
        self._prepared = None

    def _look(self, gather: Gather, step: int, *brought: Any) -> tuple[GlobalBatch, ActiveRows]:
        """brought: what the gather takes."""
        arrived = gather(*brought)
        numbers, found = self._see(gather, arrived, step)
        lowest, highest, changed, *more = numbers.tolist()
        batch = gather.settle(arrived, lowest, highest, changed)
        if batch is None:
            return self._look(gather, step, *brought)
        if self._prepared is None:
            if more:
                return batch, self._selector.fetch(found, step, more[0])
            return batch, self._selector.fetch(self._selector.choose(arrived.label_G.flatten(), step), step)
        if more[0]:  # equal on all ranks
            assert found is not None
            row = int(found.nonzero()[0, 0])
            raise ValueError(
                f"class {int(arrived.label_G[found][0])}, row {row} of the global batch, is not among the "
                "labels given to prepare() for this step: give it those of all micro-batches, and call step() or "
                "discard() after the last"
            )
        return batch, self._prepared[0]

    def _see(self, gather: Gather, arrived: Arrived, step: int) -> tuple[Tensor, Tensor | None]:
        """Returns int64 numbers: the smallest and the largest label, how many rows are not made up as expected. After
        `prepare` a fourth, how many labels were not prepared, and which those are; of a selector on the device how many
        classes it has chosen, and these. Labels may be anything here."""
        label_G, expected_G, on_device = arrived.label_G, gather.expected_origin(arrived), self._selector.on_device
        if self._prepared is None and on_device is not None:
            hard = self._selector.hard_negatives
            origin_G, each = arrived.origin_G, label_G[0].numel()
            if each > 1:  # one for each label
                label_G, origin_G, expected_G = (
                    label_G.flatten(),
                    *(x.repeat_interleave(each) for x in (origin_G, expected_G)),
                )
            listed = None if hard is None else hard.listed(label_G)
            return on_device.choose(label_G, origin_G, expected_G, listed, step)
        facts = [*label_G.aminmax(), (arrived.origin_G != expected_G).sum()]
        if self._prepared is None:
            return torch.stack(facts), None
        prepared_M = self._prepared[1]
        place_G = torch.searchsorted(prepared_M, label_G).clamp_(max=len(prepared_M) - 1)
        missing_G = prepared_M[place_G] != label_G
        return torch.stack([*facts, missing_G.sum()]), missing_G


def class_numbers(label_B: Tensor) -> Tensor:
    """Returns the labels as int64. Raises ValueError for floating, complex and bool labels."""
    if label_B.is_floating_point() or label_B.is_complex() or label_B.dtype == torch.bool:
        raise ValueError(f"labels are {label_B.dtype}; expected class numbers as integers, int64 for one")
    return label_B.long()
