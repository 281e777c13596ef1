"""Flags of several heads: `--sample-rate 0.1 words=0.3` is a value for all, and another for the head `words`. The
parser of the command line sees the latter as `--heads words.sample_rate=0.3`."""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields

from partial_fc.flags.facts import flag, switch

_NAMED = re.compile(r"([A-Za-z]\w*)=(.+)", re.ASCII)
_PATHS = ("start_centres",)  # may have an equals sign of their own


def own_flags(*groups: type, common: Collection[str] = ()) -> dict[str, bool]:
    """Returns the flags that each head may have for itself, all but `common`, and whether it is a switch."""
    each = (field for group in groups for field in fields(group))
    return {field.name: isinstance(field.default, bool) for field in each if field.name not in common}


def gathered(
    arguments: Sequence[str], names: Sequence[str], own: Collection[str], common: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Returns (the command line without the values of single heads, these as NAME.flag=value). names: of the heads.
    own: flags that take NAME=value; common: that would, if they were not of all heads. Raises ValueError for a flag of
    all heads, and for a name that is no head's."""
    kept: list[str] = []
    moved: list[str] = []
    field, goes_on = "", False  # of the flag whose values are read; whether its last value was a head's
    for word in words_of(arguments):
        if word.startswith("--"):
            kept.append(word)
            field, goes_on = word[2:].replace("-", "_"), False
            continue
        match = _NAMED.fullmatch(word) if field in {*own, *common} else None
        if match and field in common and match[1] in names:
            raise ValueError(f"{flag(field)} {word}: it is for all heads together; give one value")
        if match and match[1] in names:
            if kept and kept[-1].replace("_", "-") == flag(field):
                kept.pop()  # a flag without a value for all
            goes_on = True
            moved.append(f"{match[1]}.{field}={shlex.quote(match[2])}")
        elif match and field in own and field not in _PATHS:
            raise ValueError(f"{flag(field)} {word}: there is no {match[1]}; the heads are {', '.join(names)}")
        elif goes_on:
            moved[-1] += f" {shlex.quote(word)}"
        else:
            kept.append(word)
    return kept, moved


def of_each(given: Sequence[str], names: Sequence[str], own: Mapping[str, bool]) -> dict[str, list[str]]:
    """Returns the command line of each head by its name. given: NAME.flag=value. Raises ValueError for others."""
    words: dict[str, list[str]] = {name: [] for name in names}
    for one in given:
        match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", one)
        if match is None or match[1] not in words or match[2] not in own:
            raise ValueError(f"--heads {one}; expected NAME.flag=value with a NAME of {', '.join(names)}")
        if own[match[2]] and match[3] in ("true", "false"):
            words[match[1]].append(switch(match[2], match[3] == "true"))
        else:
            words[match[1]] += [flag(match[2]), *shlex.split(match[3])]
    return words


def words_of(arguments: Sequence[str]) -> Iterator[str]:
    """Yields the words, with --flag=value as two."""
    for word in arguments:
        name, equals, value = word.partition("=")
        yield from (name, value) if word.startswith("--") and equals else (word,)


def values_of(arguments: Sequence[str], *spellings: str) -> list[str]:
    """Returns the values of a flag where it stands last; [] where it does not."""
    values: list[str] = []
    reading = False
    for word in words_of(arguments):
        if word.startswith("--"):
            reading = word in spellings
            values = [] if reading else values
        elif reading:
            values.append(word)
    return values
