"""How the run that would go on from a checkpoint differs from the one that wrote it, by flag; told from the manifest,
before any tensor is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partial_fc import flags
from partial_fc.flags.facts import Before, Makes, MayChange, Refused, one

# What the contract says of a network's use; the flags that say it may change.
_OF_USE = ("flip",)


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
    facts: Mapping[str, tuple[object, ...]],
    num_classes: int | None = None,
) -> Differences:
    """manifest: the checkpoint's. recipe, contract (what the network is), values (of all flags): this run's. facts: of
    these flags (flags/facts.py). num_classes: of this run's head, where that has class centres."""
    found, then = Differences(), manifest.get("configuration", {})
    then_recipe = manifest.get("recipe", "face")  # older ones were of face, or said so
    if then_recipe != recipe:
        return Differences([f"recipe {then_recipe}, this is recipe {recipe}"])
    # Older ones have what made the contract among their flags.
    network = manifest.get("contract") or {name: str(value) for name, value in then.items() if name in contract}
    told: set[str] = set()
    for name, is_now in contract.items():
        if name in network and network[name] != is_now and name not in _OF_USE:
            made_by = (flag for flag, said in facts.items() if Makes(name) in said)
            by = name if name in then else next(made_by, "")
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
    for name, value in values.items():
        said = facts.get(name, ())
        now = list(value) if isinstance(value, tuple) else value  # as JSON has it
        unsaid = one(said, Before)  # older runs did not have every flag
        before = then.get(name, unsaid.value if unsaid and then else now)
        endless = isinstance(now, float) and not math.isfinite(now) and before is None  # which JSON lacks
        if name in told or MayChange in said or str(before) == str(now) or endless:
            continue
        change = f"{flags.flag(name)} {before}, this run has {now}"
        if type(before) is bool and type(now) is bool:  # as they are typed
            change = f"{flags.switch(name, before)}, this run has {flags.switch(name, now)}"
        refused = one(said, Refused)
        if refused and None not in (before, now) and refused.when(then, values):
            found.refused.append(f"{change}: {refused.why}")
        else:
            found.allowed.append(change)
    return found
