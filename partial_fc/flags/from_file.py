"""A command line in a file, `--config FILE.toml`, for runs with several heads: flags, and a table for each head.

sample_rate = 0.1
optimizer = "adamw"

[words]
rec = "captions/*.rec"
loss = "softmax"
scale = 32
"""

import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from partial_fc.files import read_text
from partial_fc.flags.by_name import values_of, words_of
from partial_fc.flags.command_line import near
from partial_fc.flags.facts import flag, switch

_MOST_BYTES = 1 << 16


def with_file(arguments: list[str], known: Collection[str], own: Collection[str]) -> list[str]:
    """Returns the command line with a .toml file of --config replaced by its flags. They come first: given ones count
    more. known: all flags; own: those of a head. Raises ValueError, with file and key, for what is no flag."""
    given = values_of(arguments, "--config")
    if not given or Path(given[0]).suffix != ".toml":
        return arguments
    words = list(words_of(arguments))
    place = len(words) - 1 - words[::-1].index("--config")
    return [*_read(Path(given[0]), known, own), *words[:place], *words[place + 2 :]]


def _read(path: Path, known: Collection[str], own: Collection[str]) -> Iterator[str]:
    if not path.is_file():
        raise ValueError(f"--config {path}: no such file")
    try:
        values = tomllib.loads(read_text(path, _MOST_BYTES))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    heads = {name: table for name, table in values.items() if isinstance(table, dict)}
    recs = [f"{name}={table.pop('rec')}" for name, table in heads.items() if "rec" in table]
    if recs and "rec" in values:
        raise ValueError(f"{path}: rec: the tables have one each; leave it out here, or there")
    for key, value in values.items():
        if key not in heads:
            name = _flag(key, known, f"{path}: {key}")
            texts = _texts(value, f"{path}: {key}")
            yield from [switch(name, value)] if isinstance(value, bool) else [flag(name), *texts]
    yield from ["--rec", *recs] if recs else []
    for head, table in heads.items():
        for key, value in table.items():
            where = f"{path}: [{head}] {key}"
            first, *more = _texts(value, where)
            yield from [flag(_flag(key, own, where)), f"{head}={first}", *more]


def _flag(key: str, known: Collection[str], where: str) -> str:
    name = key.replace("-", "_")
    if name not in known:
        raise ValueError(f"{where}: there is no flag of that name{near(name, known)}")
    return name


def _texts(value: Any, where: str) -> Sequence[str]:
    each = value if isinstance(value, list) else [value]
    if not each or not all(isinstance(one, str | int | float) for one in each):
        raise ValueError(f"{where} is {value}; expected a number, text, true, false, or a list of those")
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in each]
