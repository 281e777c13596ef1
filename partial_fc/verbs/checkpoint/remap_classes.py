"""Removes, adds and renumbers a head's classes; other rows stay bit-identical. M requested classes, D feature width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from partial_fc import printable
from partial_fc.checkpoint.head_state import tables_in
from partial_fc.checkpoint.output import new_checkpoint, print_notes
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.rows import StoredRows, class_numbers
from partial_fc.checkpoint.rows_now import RowsNow, rows_now
from partial_fc.head.rows.class_rows import Column
from partial_fc.head.rows.table import initial_centres
from partial_fc.verbs.checkpoint.reshard import copy_other_files

MAP_NAME = "class-map.tsv"


@dataclass
class Plan:
    """The classes of the new checkpoint, by number."""

    names: list[str]
    # Each class's number in the old checkpoint; -1: new.
    old: list[int]
    # Directions (D,) of the classes with a new centre, by new number.
    directions: dict[int, Tensor] = field(default_factory=dict)
    # Old number of a class merged into another -> its new one.
    joined: dict[int, int] = field(default_factory=dict)


class RemappedRows:
    """The rows of a plan. A new class with a direction has the length of trained centres, and no optimizer state; an
    old one with another direction keeps those of the last step. Training creates a new class without a direction; with
    catch-up, which would apply all past steps to it, it is a start value of now."""

    def __init__(self, stored: StoredRows, now: RowsNow, plan: Plan, num_steps: int, row_seed: int):
        self.start, self.stop = 0, len(plan.old)
        self._stored, self._now, self._directions = stored, now, plan.directions
        self._num_steps, self._row_seed = num_steps, row_seed
        self._old_C = torch.tensor(plan.old, dtype=torch.int64)
        self._kept_C = stored.created(0, stored.stop)[self._old_C.clamp(min=0)] & (self._old_C >= 0)
        self._fresh_C = (self._old_C < 0) & now.catches_up
        self._fresh_C[list(plan.directions)] = False
        self._length = typical_length(stored, now) if plan.directions else 0.0

    @property
    def columns(self) -> dict[str, Column]:
        return self._stored.columns

    def created(self, start: int, stop: int) -> Tensor:
        created_L = self._kept_C[start:stop] | self._fresh_C[start:stop]
        created_L[[number - start for number in self._directions if start <= number < stop]] = True
        return created_L

    def read(self, classes: Tensor | range) -> dict[str, Tensor]:
        class_M = class_numbers(classes)
        kept_M = self._kept_C[class_M]
        redirected_M = torch.tensor([number in self._directions for number in class_M.tolist()], dtype=torch.bool)
        rows = {name: torch.zeros(len(class_M), *c.shape, dtype=c.dtype) for name, c in self.columns.items()}
        # A direction is as of the last step: in a row as stored the steps that it missed would turn it once more.
        for source, some_M in ((self._stored, kept_M & ~redirected_M), (self._now, kept_M & redirected_M)):
            at_K = some_M.nonzero().squeeze(1)
            for name, kept in source.read(self._old_C[class_M[at_K]]).items():
                rows[name].index_copy_(0, at_K, kept)
        at_K, shape = self._fresh_C[class_M].nonzero().squeeze(1), torch.Size(self.columns["centres"].shape)
        row_KR = class_M[at_K][:, None] * shape[:-1].numel() + torch.arange(shape[:-1].numel())
        start_RD = initial_centres(row_KR.flatten(), shape[-1], self._row_seed)
        rows["centres"][at_K] = start_RD.view(-1, *shape).to(rows["centres"].dtype)
        if "touched" in rows:
            rows["touched"][at_K] = self._num_steps
        for at, (number, is_kept) in enumerate(zip(class_M.tolist(), kept_M.tolist(), strict=True)):
            if number in self._directions:
                rows["centres"][at] = self._centre(number, rows["centres"][at] if is_kept else None)
                if not is_kept and "touched" in rows:
                    rows["touched"][at] = self._num_steps  # the value accounts for all steps so far
        return rows

    def _centre(self, number: int, old: Tensor | None) -> Tensor:
        """Returns one class's centre, (D,) or (sub_centres, D). Equal sub-centres would never separate: the others of a
        new class are start values."""
        direction_D = self._directions[number]
        length = self._length if old is None else old.float().norm()
        centre_D = direction_D / direction_D.norm() * length
        shape = self.columns["centres"].shape
        if len(shape) == 1:
            return centre_D
        subs, width = shape
        centre_RD = initial_centres(torch.arange(number * subs, (number + 1) * subs), width, self._row_seed)
        centre_RD[0] = centre_D
        return centre_RD


def typical_length(stored: StoredRows, now: RowsNow) -> float:
    """Returns the median length of updated centres after the last step; of start values if there are none."""
    lengths = [torch.empty(0)]
    for before, part in zip(stored.parts(), now.parts(), strict=True):
        length = torch.linalg.vector_norm(part.tensors["centres"], dim=-1, dtype=torch.float32)
        touched = before.tensors.get("touched", torch.ones(1))
        lengths.append(length[(touched > 0).squeeze(-1).expand_as(length)])
    length_N = torch.cat(lengths)
    if not len(length_N):
        return 0.01 * stored.columns["centres"].shape[-1] ** 0.5
    return length_N.median().item()


def write(stored: Checkpoint, plan: Plan, out: Path, made_by: str) -> None:
    """Writes the new checkpoint, for the same number of ranks, with a map of class numbers beside it."""
    table, before = tables_in(stored.manifest, stored.where)[""], stored.names()
    head = table["head"]
    rows = RemappedRows(stored.rows(), rows_now(stored), plan, head["num_steps"], head["row_seed"])
    manifest = {**stored.manifest, "tables": {"": {**table, "num_classes": len(plan.names)}}}
    with new_checkpoint(out, manifest, plan.names, made_by) as output:
        output.rows(rows)
        print_notes(copy_other_files(stored, output, same_classes=False))
        output.text(MAP_NAME, _map(plan, before))
    new = sum(old < 0 for old in plan.old)
    print(
        f"{out}: {len(plan.names)} classes, {new} of them new, {len(plan.directions)} with a new centre; "
        f"{len(before)} before. Their numbers then and now: {out / MAP_NAME}"
    )


def _map(plan: Plan, before: Sequence[str]) -> list[str]:
    """Returns old number, new number, name, a line per class of either; "-" for none."""
    now: Mapping[int, int] = {old: number for number, old in enumerate(plan.old) if old >= 0} | plan.joined
    lines = ["old\tnew\tname"]
    lines += [f"{old}\t{now.get(old, '-')}\t{printable.name(name)}" for old, name in enumerate(before)]
    lines += [f"-\t{number}\t{printable.name(plan.names[number])}" for number, old in enumerate(plan.old) if old < 0]
    return lines
