"""The tables of tests/world: what is found in the world, who writes it, and what is right.

A row is one input (a file, a checkpoint, the environment of a launcher) as other people's programs make it, with the
value that it must give here. Reports of people are named by repository and number; all content is made up.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest


class Row(NamedTuple):
    """what: a few words, the test's name. writer: the program or report that it comes from. given: what the test makes
    or sets. right: what must come of it."""

    what: str
    writer: str
    given: Any
    right: Any


def table(rows: Iterable[Row]) -> pytest.MarkDecorator:
    """Returns the decorator of a test that has one parameter, `row`."""
    rows = list(rows)
    names = [row.what for row in rows]
    assert len(set(names)) == len(names), "two rows have one name"
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.what) for row in rows])
