"""Reads a few flags of a command line before tyro does: other trainers', and those that choose face's defaults."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any


def split(
    arguments: list[str], names: Iterable[str], options: Mapping[str, Mapping[str, Any]] = {}
) -> tuple[dict[str, Any], list[str]]:
    """Returns (values of the given flags among `options`, by name; the other words). options: argparse's, of flags
    whose value is absent or optional; "short": a second spelling. Raises ValueError for a missing value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in dict.fromkeys(names):
        more = dict(options.get(name, {}))
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", more.pop("short", f"--{name}")))
        parser.add_argument(*spellings, dest=name, **more)
    try:
        theirs, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        what = " needs a value" if error.message == "expected one argument" else f": {error.message}"
        raise ValueError(f"{error.argument_name}{what}") from None
    return {name: value for name, value in vars(theirs).items() if value is not None}, others


def count(given: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Returns a value as an integer of at least `least`. Raises ValueError for anything else."""
    if not given[name].isdecimal() or int(given[name]) < least:
        raise ValueError(f"--{name} is {given[name]}; expected a whole number of at least {least}")
    return int(given[name])
