"""How the run that would go on from a checkpoint differs from the one that wrote it, by flag; told from the manifest,
before any tensor is read."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from partial_fc import flags

# Groups of flags that say how and where a run is trained, not what it learns, and flags that say how long: they may
# change on the way.
_MAY_CHANGE = (flags.LaunchFlags, flags.RunFlags, flags.GuardFlags)
_HOW_LONG = ("epochs", "max_steps")
# What a network is made by, where the contract calls it something else.
_FLAG_OF = {"groups": "resnext_num_groups", "width_per_group": "resnext_width_per_group", "network": "model"}
# What the contract says of a network's use; the flags that say it may change.
_OF_USE = ("flip",)
# Flags that tensors are shaped by, or mean something else with. None says nothing: the data does.
_FIXED = {
    "num_classes": "these are other classes",
    "num_labels": "these are other classes",
    "head": "this is another last layer",
    "sub_centres": "the class centres do not fit",
    "optimizer": "its state is of no use to another one",
}
_SAME_STATE = {"nesterov": "sgd"}
# Flags that came later: what was done before there were any.
_BEFORE = {"quota": "negatives"}


@dataclass
class Differences:
    """What is another one now, in the words of the command line. refused: nothing can go on from the checkpoint so;
    allowed: it can, but it is not the same run."""

    refused: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    def check(self, folder: object) -> None:
        """Raises ValueError where any is refused."""
        if self.refused:
            raise ValueError(
                f"{folder} was trained with {'; with '.join(self.refused)}. Go on with what it was trained with, or "
                "start anew with --models-root NEW"
            )


def compare(
    manifest: Mapping[str, Any],
    recipe: str,
    contract: Mapping[str, str],
    values: Mapping[str, Any],
    may_change: Collection[str] = (),
    num_classes: int | None = None,
) -> Differences:
    """manifest: the checkpoint's. recipe, contract (what the network is), values (of all flags): this run's.
    may_change: the recipe's own flags that do not make another run of this one. num_classes: of this run's head, where
    that has class centres."""
    found, then = Differences(), manifest.get("configuration", {})
    then_recipe = manifest.get("recipe", "face")  # older ones were of face, or said so
    if then_recipe != recipe:
        return Differences([f"recipe {then_recipe}, this is recipe {recipe}"])
    # Older ones have what made the contract among their flags.
    network = manifest.get("contract") or {name: str(value) for name, value in then.items() if name in contract}
    told: set[str] = set()
    for name, is_now in contract.items():
        if name in network and network[name] != is_now and name not in _OF_USE:
            by = name if name in then else _FLAG_OF.get(name, "")
            told.add(by)
            what = flags.flag(by) if by in then else f"another {name} of the network:"
            found.refused.append(f"{what} {network[name]}, this run has {is_now}: its weights do not fit")
    stored = manifest.get("num_classes")
    if num_classes is not None and type(stored) is int and stored != num_classes:
        told.add("num_classes")
        found.refused.append(
            f"--num-classes {stored}, this run has {num_classes}: these are other classes (`partial-fc checkpoint "
            "classes` adds and removes them)"
        )
    free = {name for group in _MAY_CHANGE for name in group.__dataclass_fields__} - {"seed"}
    free |= {*_HOW_LONG, *may_change, *told}
    for name, value in values.items():
        now = list(value) if isinstance(value, tuple) else value  # as JSON has it
        before = then.get(name, _BEFORE.get(name, now) if then else now)  # older runs did not have every flag
        endless = isinstance(now, float) and not math.isfinite(now) and before is None  # which JSON lacks
        if name in free or str(before) == str(now) or endless:
            continue
        change = f"{flags.flag(name)} {before}, this run has {now}"
        if type(before) is bool and type(now) is bool:  # as they are typed
            change = f"{flags.switch(name, before)}, this run has {flags.switch(name, now)}"
        why = _FIXED.get(name) if None not in (before, now) else None
        if name == "head_optimizer" and _moved_by(then) != _moved_by(values):
            why = _FIXED["optimizer"]
        if name == "head_catch_up" and now == "exact":
            why = "the past learning rates of the centres are not known"
        if why:
            found.refused.append(f"{change}: {why}")
        else:
            found.allowed.append(change)
    return found


def _moved_by(values: Mapping[str, Any]) -> str:
    """What moves the class centres."""
    name = values.get("head_optimizer", "same")
    name = values.get("optimizer") if name == "same" else name
    return _SAME_STATE.get(str(name), str(name))
