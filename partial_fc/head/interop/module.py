"""The head as an nn.Module: its state_dict has this rank's rows under their class range.

    classes_0_501.centres, classes_0_501.momentum, ...   one entry for each local class
    _extra_state                                         what is equal on all ranks: JSON, as a tensor of bytes

The range is part of the names, so a state of another rank or of another number of ranks has other names and is refused;
it never fits by chance. All entries are tensors, so safetensors can store them, too. Tables are no parameters: no
optimizer, DistributedDataParallel, FSDP or weight decay finds them in `parameters()`. The centres are a buffer, too
(visible.py).
"""

import copy
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from partial_fc.comm import World, from_process_group
from partial_fc.head.interop.inputs import integer_of, num_processes
from partial_fc.head.interop.visible import Facts, read_facts
from partial_fc.head.shard import Shard

if TYPE_CHECKING:
    from partial_fc.head.options import LossOptions
    from partial_fc.head.pending import Pending
    from partial_fc.head.rows import RowTable
    from partial_fc.head.selection.hard_negatives import HardNegatives
    from partial_fc.head.selection.sampling import Draw

_EXTRA = "_extra_state"
_RANGE = re.compile(r"classes_(\d+)_(\d+)\.")


class HeadModule(nn.Module):
    """Base class of PartialFC with what nn.Module needs: state_dict, copies, pickling, devices, resize. It calls the
    subclass' rows, facts, load_facts, forget, arguments and _make_rows."""

    world: World
    shard: Shard
    store: "RowTable"
    pending: "Pending"
    hard_negatives: "HardNegatives | None"
    num_classes: int
    embedding_size: int
    sub_centres: int
    loss: "LossOptions"
    draw: "Draw"
    _may_join: bool
    _has_stepped: bool

    def __init__(self) -> None:
        super().__init__()
        self._is_copied = False  # whether there are copies, of which one may be an average
        # accelerate wraps what it prepares into DistributedDataParallel, which refuses a module without parameters.
        # With this, accelerator.prepare(head) gives the head back as it is.
        self._is_accelerate_prepared = True

    # ---- state

    def own_state(self) -> dict[str, Tensor]:
        """Returns this rank's rows and lists of hard negatives by name, without the class range. Not copies."""
        lists = {} if self.hard_negatives is None else self.hard_negatives.state()
        return self.rows.tables() | {f"hard_negatives.{name}": t for name, t in lists.items()}

    @property
    def range_prefix(self) -> str:
        return f"classes_{self.shard.start}_{self.shard.stop}."

    def common_state(self) -> dict[str, Any]:
        """Returns the state that is equal on all ranks, as plain values."""
        return self.identity() | {"facts": self.facts()}

    def identity(self) -> dict[str, int]:
        """Returns what a state has to have in common with this head."""
        return {name: getattr(self, name) for name in ("num_classes", "embedding_size", "sub_centres")}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self._is_copied:  # whoever averages states is to see all rows as of one step
            self.store.rows_in_place()
        destination[prefix + _EXTRA] = Facts.of(self, json.dumps(self.common_state()).encode())
        for name, t in self.own_state().items():
            destination[prefix + self.range_prefix + name] = t

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes over a state of this range of classes. Anything else is an error of `load_state_dict` that names both
        ranges, whatever `strict` is; a state without a head counts as missing."""
        found = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        is_there = _EXTRA in found
        common = read_facts(found.pop(_EXTRA, None))
        own = {
            name.removeprefix(self.range_prefix): t for name, t in found.items() if name.startswith(self.range_prefix)
        }
        if not is_there and not found:
            missing_keys += [prefix + self.range_prefix + name for name in self.own_state()]
        elif problem := self._misfit(common, found, own):
            error_msgs.append(f"{self.world}: {problem}")
        else:
            self.load_own(common["facts"], own)

    def load_own(self, facts: dict[str, Any], own: dict[str, Tensor]) -> None:
        """Loads `facts` and what `own_state` returned."""
        self.forget()
        self.load_facts(facts)
        kind = "hard_negatives."
        rows = {name: t.reshape(-1, t.shape[-1]) for name, t in own.items() if not name.startswith(kind)}
        self.store.load_row_state(rows)
        lists = {n.removeprefix(kind): t for n, t in own.items() if n.startswith(kind)}
        if self.hard_negatives is not None:
            self.hard_negatives.load_state(lists) if lists else self.hard_negatives.clear()  # sharded.py has none

    def _misfit(self, common: Any, found: dict[str, Any], own: dict[str, Tensor]) -> str:
        """Why a state cannot be this head's; nothing where it can."""
        if not isinstance(common, dict) or "facts" not in common:
            what = "another layer, only a part, or an average (copy that entry from one of them)"
            return f"the state has {sorted(found)}, no {_EXTRA} of a head: is it of {what}?"
        for name, value in self.identity().items():
            if common.get(name) != value:
                return f"the state has {name} {common.get(name)}, this head {value}"
        ranges = sorted({(int(m[1]), int(m[2])) for m in map(_RANGE.match, found) if m})
        if ranges != [(self.shard.start, self.shard.stop)]:
            said = ", ".join(f"[{start}, {stop})" for start, stop in ranges) or "none"
            return (
                f"the state has classes {said}, this rank [{self.shard.start}, {self.shard.stop}) of "
                f"{self.num_classes}: each rank saves its own state and loads that; for another number of ranks save "
                "head.sharded() with torch.distributed.checkpoint"
            )
        if own.keys() != (expected := self.own_state()).keys():
            return f"the state has {sorted(own)}; expected {sorted(expected)} (another optimizer, or hard negatives?)"
        return ""

    def resize(self, num_classes: int) -> None:
        """Changes the number of classes: new ones start as in a fresh head, by (seed, class), the last ones go, all
        others keep rows and optimizer state, bit for bit, on the ranks of the new ranges. A collective, an all-to-all
        of all rows. Raises ValueError for hard negatives, whose lists number the classes."""
        if self.hard_negatives is not None:
            raise ValueError("resize: not with hard negatives; make a new head, and checkpoint tools")
        num_classes = integer_of("num_classes", num_classes)
        world, kept = self.world, min(num_classes, self.num_classes)
        old = [Shard.of(self.num_classes, rank, world.size) for rank in range(world.size)]
        new = [Shard.of(num_classes, rank, world.size) for rank in range(world.size)]
        start, stop = new[world.rank].start, new[world.rank].stop

        def common(one: Shard, other: Shard) -> tuple[int, int]:
            """The range of classes that both have and that are kept; empty ranges end where they begin."""
            first = max(one.start, other.start)
            return first, max(first, min(one.stop, other.stop, kept))

        moved = {}
        for name, table in self.rows.tables().items():
            pieces = [common(self.shard, its) for its in new]
            sent = torch.cat([table[first - self.shard.start : last - self.shard.start] for first, last in pieces])
            arriving = [last - first for first, last in (common(its, new[world.rank]) for its in old)]
            work = world.start_all_to_all(
                sent, [last - first for first, last in pieces], arriving, name=f"head/resize/{name}"
            )
            found = work.wait()
            moved[name] = torch.cat([found, found.new_zeros(stop - start - len(found), *found.shape[1:])])
        self._remake(moved, num_classes, world)
        if (kept_here := max(0, min(kept - start, stop - start))) < stop - start:
            self.store.start_now(kept_here * self.sub_centres)

    def join_processes(self) -> None:
        """Before a training step, shards a head that was made without world= before torch.distributed had several
        processes, as HF Trainer's users make it, over all of them; warns once. A collective. Raises ValueError where it
        has trained alone."""
        if not self._may_join or not self.training or not torch.is_grad_enabled() or num_processes() == 1:
            return
        made = f"PartialFC without world=, made before torch.distributed had its {num_processes()} processes"
        other = "world=torch.distributed.new_group() after that, or partial_fc.comm.SingleWorld(): one for each process"
        if self._has_stepped:
            raise ValueError(f"{made}, has made steps alone; make it with {other}")
        world = from_process_group(torch.distributed.new_group())
        gradients = self.loss.backbone_gradients or "average"  # as DistributedDataParallel does
        warnings.warn(f"{made}: they share its classes, {gradients} gradients ({other})", stacklevel=5)
        shard = Shard.of(self.num_classes, world.rank, world.size)
        rows = {name: t[shard.start : shard.stop] for name, t in self.rows.tables().items()}
        self.loss, self._may_join = replace(self.loss, backbone_gradients=gradients), False
        self._remake(rows, self.num_classes, world)

    def _remake(self, own: dict[str, Tensor], num_classes: int, world: World) -> None:
        """Makes the rows anew, for other classes or ranks, and loads what `own_state` is to be. The optimizer stays."""
        facts, on_backward = copy.deepcopy(self.facts()), self.pending.on_backward
        self.store.close()
        self.num_classes, self.world = num_classes, world
        self.draw = replace(self.draw, num_classes=num_classes)
        self._make_rows()
        self.pending.on_backward = on_backward
        self.load_own(facts, own)

    def __getattr__(self, name: str) -> Any:
        """Finds the names of the state: torch.distributed.checkpoint.state_dict looks each part of them up."""
        if not name.startswith("classes_") or name != self.range_prefix[:-1]:
            return super().__getattr__(name)
        caller = sys._getframe(1).f_back  # get_model_state_dict says nowhere else whether one state is to hold all
        if self.world.size > 1 and caller and getattr(caller.f_locals.get("info"), "full_state_dict", False):
            remedy = "leave it out, or save head.sharded() with torch.distributed.checkpoint"
            raise ValueError(f"{self.world}: full_state_dict=True would hold one rank's centres alone: {remedy}")
        lists = {} if self.hard_negatives is None else self.hard_negatives.state()
        return SimpleNamespace(**self.rows.tables(), hard_negatives=SimpleNamespace(**lists))

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadModule":
        """Returns a head with its own copy of the rows, in the same world, without pending gradients."""
        twin = type(self)(**self.arguments())
        self.store.rows_in_place()  # an average would overwrite start values that are still to be made
        twin.load_own(copy.deepcopy(self.facts()), self.own_state())
        twin._is_copied, twin._may_join = True, self._may_join
        self._is_copied = True
        memo[id(self)] = twin
        return twin.train(self.training)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle. Raises TypeError where other ranks have the rest: a process group cannot be pickled."""
        if self.world.size > 1:
            raise TypeError(
                f"{self.world}: a head that is sharded over several ranks cannot be pickled; save head.state_dict() "
                "on each rank"
            )
        arguments = {name: value for name, value in self.arguments().items() if name != "world"}
        return _unpickled, (type(self), arguments, self.state_dict(), self.training)

    # ---- devices

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HeadModule":
        """`to(device)`, `cuda()`: raises ValueError where the head would have to move: its device is given when it is
        made. Changes of dtype leave the head as it is: it chooses the precision of its own products and sums."""
        here = torch.empty(0, device=self.store.device)
        moved = fn(here)
        if moved.device != here.device:
            raise ValueError(
                f"{self.world}: the head is on {here.device} and cannot move to {moved.device}: make it with "
                f"device={str(moved.device)!r}, or move the model before the head becomes part of it"
            )
        return self


def _unpickled(kind: type, arguments: dict[str, Any], state: dict[str, Any], training: bool) -> HeadModule:
    head = kind(**arguments)
    head.load_state_dict(state)
    return head.train(training)
