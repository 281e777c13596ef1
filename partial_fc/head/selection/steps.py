"""A value for each step: sample rates and margins that change during training.

They are pure functions of the step, so there is no state to save, and ranks need not agree upon it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Steps(Generic[T_co]):
    """Steps({0: 0.3, 6000: 1.0}) is 0.3 in steps 0 to 5999 and 1.0 from step 6000 on.

    Steps are those of `head.num_steps`: the first is 0, and one that is skipped does not count. Raises ValueError for
    steps that do not begin at 0 and ascend.
    """

    by_step: Mapping[int, T_co]

    def __post_init__(self) -> None:
        steps = list(self.by_step)
        if steps[:1] != [0] or any(later <= step for step, later in pairwise(steps)):
            raise ValueError(f"Steps of {steps}; expected 0 and then later steps, ascending, as {{0: 0.3, 6000: 1.0}}")

    def at(self, step: int) -> T_co:
        """Returns the value of a step."""
        return self.by_step[max(first for first in self.by_step if first <= step)]

    def next_change(self, step: int) -> int | None:
        """Returns the first later step with an entry of its own; None: the value stays."""
        return min((first for first in self.by_step if first > step), default=None)

    def __str__(self) -> str:
        return " ".join(f"{step}:{value}" for step, value in self.by_step.items())


def steps_of(value: T | Steps[T]) -> Steps[T]:
    """Returns what is given for all steps as Steps."""
    return value if isinstance(value, Steps) else Steps({0: value})
