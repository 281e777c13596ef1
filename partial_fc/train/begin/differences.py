"""The differences, by flag, between a run and its checkpoint's, from the manifest, before any tensor is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partial_fc import flags
from partial_fc.flags.facts import Before, Makes, MayChange, Refused, one

# Parts of the contract about a network's use; the flags that they depend on may change.
_OF_USE = ("flip",)


@dataclass
class Differences:
    """The differences, by flag. refused: makes resuming impossible; allowed: possible, but not the same run."""

    refused: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    def check(self, folder: object) -> None:
        """Raises ValueError if any is refused."""
        if self.refused:
            raise ValueError(
                f"{folder} was trained with {'; with '.join(self.refused)}. Resume with the same flags, or "
                "start from scratch with --models-root NEW"
            )


def compare(
    manifest: Mapping[str, Any],
    recipe: str,
    contract: Mapping[str, str],
    values: Mapping[str, Any],
    facts: Mapping[str, tuple[object, ...]],
    num_classes: int | None = None,
) -> Differences:
    """Returns the differences. manifest: the checkpoint's. recipe, contract (of the network), values (of all flags):
    this run's. facts: of these flags (flags/facts.py). num_classes: of this run's head, if that has class centres."""
    found, then = Differences(), manifest.get("configuration", {})
    then_recipe = manifest.get("recipe", "face")  # older manifests are of face, or have the recipe
    if then_recipe != recipe:
        return Differences([f"recipe {then_recipe}, this is recipe {recipe}"])
    # Older manifests have what made the contract among their flags.
    network = manifest.get("contract") or {name: str(value) for name, value in then.items() if name in contract}
    reported: set[str] = set()
    for name, is_now in contract.items():
        if name in network and network[name] != is_now and name not in _OF_USE:
            made_by = (flag for flag, marks in facts.items() if Makes(name) in marks)
            by = name if name in then else next(made_by, "")
            reported.add(by)
            what = flags.flag(by) if by in then else f"another {name} of the network:"
            found.refused.append(f"{what} {network[name]}, this run has {is_now}: its weights do not fit")
    stored = manifest.get("num_classes")
    if num_classes is not None and type(stored) is int and stored != num_classes:
        reported.add("num_classes")
        found.refused.append(
            f"--num-classes {stored}, this run has {num_classes}: these are other classes (`partial-fc checkpoint "
            "classes` adds and removes them)"
        )
    for name, value in values.items():
        marks = facts.get(name, ())
        # As in JSON.
        now = [str(one) if isinstance(one, Path) else one for one in value] if isinstance(value, tuple) else value
        default = one(marks, Before)  # missing in older runs
        before = then.get(name, default.value if default and then else now)
        endless = isinstance(now, float) and not math.isfinite(now) and before is None  # which JSON lacks
        if name in reported or MayChange in marks or str(before) == str(now) or endless:
            continue
        change = f"{flags.flag(name)} {before}, this run has {now}"
        if type(before) is bool and type(now) is bool:  # as typed on the command line
            change = f"{flags.switch(name, before)}, this run has {flags.switch(name, now)}"
        refused = one(marks, Refused)
        if refused and None not in (before, now) and refused.when(then, values):
            found.refused.append(f"{change}: {refused.why}")
        else:
            found.allowed.append(change)
    return found
