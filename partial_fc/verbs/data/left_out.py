"""Threaded, ordered processing of a set's records that skips unusable ones."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from partial_fc import terminal
from partial_fc.data.sample import BadRecord

_CHUNK = 512  # records in progress at once

_log = logging.getLogger(__name__)
Item = TypeVar("Item")
Made = TypeVar("Made")


def usable(
    make: Callable[[Item], Made], items: Sequence[Item], num_threads: int, most_bad: int, verb: str, unit: str = "image"
) -> Iterator[tuple[Item, Made]]:
    """Yields (item, make(item)) in order, with a progress bar. Reports and skips an item for which make raises
    BadRecord. Raises ValueError for more than most_bad of them."""

    def made(item: Item) -> Made | BadRecord:
        try:
            return make(item)
        except BadRecord as error:
            return error

    num_bad = 0
    with (
        ThreadPoolExecutor(num_threads) as pool,
        terminal.bar(total=len(items), desc=verb, unit=unit, leave=False) as bar,
    ):
        for start in range(0, len(items), _CHUNK):
            chunk = items[start : start + _CHUNK]
            for item, result in zip(chunk, pool.map(made, chunk), strict=True):
                bar.update()
                if not isinstance(result, BadRecord):
                    yield item, result
                    continue
                num_bad += 1
                if num_bad > most_bad:
                    raise ValueError(
                        f"{result} (bad {unit} {num_bad}, at most {most_bad} are left out: --max-bad-records)"
                    )
                _log.warning("left out: %s", result)
