"""The parts of a recipe, in one import (docs/recipes.md):

    from partial_fc.recipe import CrossEntropy, ImageFolder, Run, SharedFlags, parse, start

Names that need torch are imported on first use: a recipe that imports them where it trains shows its help within a
second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_fc.flags import (
    ExchangeFlags,
    Flags,
    GuardFlags,
    HeadFlags,
    LaunchFlags,
    OptimFlags,
    RunFlags,
    ScheduleFlags,
    basic,
    check_numbers,
    parse,
)
from partial_fc.flags.facts import Basic, In, MayChange, Refused
from partial_fc.on_demand import on_demand
from partial_fc.train.begin.start import launch

if TYPE_CHECKING:
    from partial_fc.data import BadRecord, ImageFolder, Sample, Source
    from partial_fc.data.order import Keyed, Order
    from partial_fc.data.transform import ShortSideCrop, SquareImage, mirror
    from partial_fc.evaluate.classification import Classification
    from partial_fc.evaluate.evaluation import Evaluation, Forward
    from partial_fc.head import CrossEntropy, PartialFC
    from partial_fc.models.inputs import FACE, MNIST, TORCHVISION, Pixels, Unchanged
    from partial_fc.train.job import Hooks, RunState
    from partial_fc.train.record.log import SecondFile
    from partial_fc.train.run import Run

_ON_DEMAND = {
    "data": "BadRecord ImageFolder Sample Source",
    "data.order": "Keyed Order",
    "data.transform": "ShortSideCrop SquareImage mirror",
    "evaluate.classification": "Classification",
    "evaluate.evaluation": "Evaluation Forward",
    "head": "CrossEntropy PartialFC",
    "models.inputs": "FACE MNIST TORCHVISION Pixels Unchanged",
    "train.job": "Hooks RunState",
    "train.record.log": "StepLine",
    "train.run": "Run run_recipe",
}
__getattr__ = on_demand("partial_fc", {name: module for module, names in _ON_DEMAND.items() for name in names.split()})


@dataclass(frozen=True, kw_only=True)
class SharedFlags:
    """The flag groups of every recipe, for a Config to inherit; it has `run`, with its own folder, besides."""

    optim: Flags[OptimFlags] = OptimFlags()
    schedule: Flags[ScheduleFlags] = ScheduleFlags()
    guards: Flags[GuardFlags] = GuardFlags()
    exchange: Flags[ExchangeFlags] = ExchangeFlags()
    launch: Flags[LaunchFlags] = LaunchFlags()


def start(
    name: str,
    train_here: Callable[["Run"], int],
    config: Any,
    notes: Sequence[str] = (),
    *,
    called: tuple[str | Path, str] | None = None,
    bare: bool = False,
    hist: "SecondFile | None" = None,
    first: Callable[[LaunchFlags], int | None] | None = None,
) -> int:
    """Starts the processes of the flags, and calls train_here in each process that trains. Returns the exit status.
    first: another way to start the processes than --gpus and --nodes, which returns a status if it did. Other
    arguments: see `run_recipe`."""
    status = launch(config, called, first)
    if status is not None:
        return status
    from partial_fc.train.run import run_recipe

    return run_recipe(name, config, notes, train_here, bare, hist, called)
