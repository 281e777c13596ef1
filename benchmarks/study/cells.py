"""The runs of a study: (cell, seed)."""

from collections.abc import Iterable
from dataclasses import dataclass

POINTS = 5  # of a curve
BATCH = 128


@dataclass(frozen=True, order=True)
class Cell:
    """One treatment (arm) of one training set; SET-ARM in file names and on command lines."""

    set: str
    arm: str

    @classmethod
    def parse(cls, text: str) -> "Cell":
        name, _, arm = text.partition("-")
        if not arm:
            raise ValueError(f"cell {text!r}: expected SET-ARM")
        return cls(name, arm)

    def __str__(self) -> str:
        return f"{self.set}-{self.arm}"


Stage = Iterable[tuple[str, tuple[str, ...], int]]  # (set, arms, seeds)


def registered(stages: Iterable[Stage]) -> list[tuple[Cell, int]]:
    """Returns all (cell, seed) in the order in which they are run: by stage, then by seed, so that every prefix of a
    stage compares all of its arms."""
    runs: dict[tuple[Cell, int], None] = {}
    for stage in map(list, stages):
        for seed in range(max(seeds for _, _, seeds in stage)):
            for name, arms, seeds in stage:
                runs |= {(Cell(name, arm), seed): None for arm in arms if seed < seeds}
    return list(runs)


def steps(num_classes: int, visits: int) -> int:
    """Returns the steps of a run, a multiple of POINTS. visits: how often it sees a class, on average."""
    return POINTS * round(num_classes * visits / BATCH / POINTS)
