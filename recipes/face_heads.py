"""Several heads: `--rec image=A words=B --sample-rate words=0.1` names the sets, and each has a head of its own."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from partial_fc import flags
from partial_fc.errors import UsageError
from partial_fc.files import named
from partial_fc.flags import Flags, HeadFlags, check_numbers
from partial_fc.flags.facts import In
from partial_fc.flags.numbers import LABELS, flag

if TYPE_CHECKING:
    from partial_fc.data import Source
    from partial_fc.head import Heads
    from partial_fc.train.run import Run

_NAMED = re.compile(r"([A-Za-z]\w*)=(.+)", re.ASCII)
_BATCH = "batch_size"  # of a process: the sum of the sets'
# What all heads have in common: the norm of the whole gradient, the looks at the rows, and the centres to start from.
_COMMON = {"head_clip", "telemetry_every", "start_centres", "imprint_images"}


@dataclass(frozen=True, kw_only=True)
class _SetFlags:
    """What a set may have otherwise than the others besides its head."""

    batch_size: int = 0
    labels: Annotated[int, In(LABELS)] = 1
    labels_drawn: int = 0

    def __post_init__(self) -> None:
        check_numbers(self)
        check_drawn(self.labels, self.labels_drawn)


@dataclass(frozen=True, kw_only=True)
class _OfSet:
    head: Flags[HeadFlags]
    data: Flags[_SetFlags]


_OWN = {field.name for kind in (HeadFlags, _SetFlags) for field in fields(kind)} - _COMMON


@dataclass(frozen=True)
class NamedHead:
    """The head of a set. share: the set's samples in a batch of a process; 0: as many as come. labels: of a sample;
    drawn: in a step."""

    name: str
    flags: HeadFlags
    share: int
    labels: int
    drawn: int


def check_drawn(labels: int, drawn: int) -> None:
    """Raises ValueError if more labels are to be drawn than an image has."""
    if drawn > labels:
        raise ValueError(
            f"--labels-drawn {drawn} with --labels {labels}: an image has no more than that; give a larger --labels, "
            "or draw fewer"
        )


def names_of(recs: tuple[Path, ...]) -> list[str]:
    """Returns the names in --rec NAME=path ...; []: the sets have none. Raises ValueError if only some have one."""
    names = [name for name, _ in map(named, recs) if name]
    if not names:
        return []
    if len(names) < len(recs) or len(names) == 1:
        raise ValueError(
            f"--rec {' '.join(map(str, recs))}: a named set has a head of its own; name two sets or more, and each"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--rec names {' and '.join(sorted(twice))} twice; a head's name is one set's")
    return names


def gathered(arguments: list[str]) -> list[str]:
    """Returns the command line with `--sample-rate words=0.1` as `--heads words.sample_rate=0.1`, and --batch-size as
    the sum of named ones. Raises ValueError for a name that --rec does not have, and for a flag of all heads."""
    names = _named_in(arguments)
    if not names:
        return arguments
    kept: list[str] = []
    own: list[str] = []
    sizes: dict[str, str] = {}
    field, moved = "", False  # of the flag whose values are read; whether its last value went to a head
    for word in _split(arguments):
        if word.startswith("--"):
            kept.append(word)
            field, moved = word[2:].replace("-", "_"), False
            continue
        match = _NAMED.fullmatch(word) if field in _OWN | _COMMON else None
        if match and field in _COMMON and match[1] in names:
            raise ValueError(f"{flag(field)} {word}: it is for all heads together; give one value")
        if match and match[1] in names:
            if kept[-1] == flag(field) or kept[-1].replace("_", "-") == flag(field):
                kept.pop()  # a flag without a value for all
            moved = True
            own.append(f"{match[1]}.{field}={shlex.quote(match[2])}")
            if field == _BATCH:
                sizes[match[1]] = match[2]
        elif match and field in _OWN and field not in ("centre_path",):
            raise ValueError(f"{flag(field)} {word}: no set is named {match[1]}; --rec names {', '.join(names)}")
        elif moved:
            own[-1] += f" {shlex.quote(word)}"
        else:
            kept.append(word)
    if sizes:
        if missing := [name for name in names if name not in sizes]:
            raise ValueError(f"--batch-size names {', '.join(sizes)}, and not {', '.join(missing)}; give each set's")
        if not all(size.isdecimal() and int(size) for size in sizes.values()):
            raise ValueError(f"--batch-size is {' '.join(f'{k}={v}' for k, v in sizes.items())}; expected 1 or more")
        kept += ["--batch-size", str(sum(map(int, sizes.values())))]
    return [*kept, *(["--heads", *own] if own else [])]


def of(config: Any) -> list[NamedHead]:
    """Returns the heads of a configuration; [] if it has one without a name. Raises ValueError for flags that do not
    go together."""
    data, names = config.data, names_of(config.data.recs)
    if not names:
        if data.heads:
            raise ValueError(f"--heads {data.heads[0]} ...: --rec names no sets; expected --rec NAME=path NAME=path")
        return []
    for name, given in {
        "--num-classes": data.num_classes is not None, "--shared-classes": data.shared_classes,
        f"--balance {data.balance}": data.balance != "none", f"--order {data.order}": data.order != "shuffled",
        "--accumulate": config.optim.accumulate > 1, "--start-centres": config.head.start_centres is not None,
    }.items():  # fmt: skip
        if given:
            raise ValueError(f"{name} with sets that have heads of their own ({', '.join(names)}); leave it out")
    words: dict[str, list[str]] = {name: [] for name in names}
    for one in data.heads:
        match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", one)
        if match is None or match[1] not in words or match[2] not in _OWN:
            raise ValueError(f"--heads {one}; expected NAME.flag=value with a NAME of {', '.join(names)}")
        words[match[1]] += [flag(match[2]), *shlex.split(match[3])]
    return [_parsed(name, words[name], config) for name in names]


def _parsed(name: str, words: list[str], config: Any) -> NamedHead:
    of_all = ["--labels", str(config.data.labels), "--labels-drawn", str(config.data.labels_drawn)]
    try:
        given = flags.parse(_OfSet, [*of_all, *words], "--heads", default=_OfSet(head=config.head, data=_SetFlags()))
    except UsageError as error:
        raise ValueError(f"head {name}: {error}") from error
    data = given.data
    return NamedHead(name, given.head, data.batch_size, data.labels, data.labels_drawn or data.labels)


def build(
    run: Run, heads: list[NamedHead], source: Source, embedding_size: int, backbone: Any, ignore_index: int | None
) -> Heads:
    """Returns a head for each set, in the sets' order."""
    from partial_fc.data.sets.joined import Joined
    from partial_fc.head import Heads

    assert isinstance(source, Joined)  # of two sets or more
    classes = {shard.name: len(shard.class_C) for shard in source.shards}
    parts = {
        one.name: run.partial_fc(one.flags, classes[one.name], embedding_size, backbone, ignore_index, one.name)
        for one in heads
    }
    lr = run.config.schedule.lr
    return Heads(
        weights={one.name: one.flags.head_weight for one in heads},
        lr_ratios={one.name: one.flags.settings(lr)["head_lr_ratio"] for one in heads},
        num_labels={one.name: one.drawn for one in heads},
        **parts,
    )


def _split(arguments: list[str]) -> list[str]:
    """Returns the words, with --flag=value as two."""
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        words += [name, value] if word.startswith("--") and equals else [word]
    return words


def _named_in(arguments: list[str]) -> list[str]:
    """Returns the names in --rec NAME=path ... of a command line."""
    recs: list[Path] = []
    reading = False
    for word in _split(arguments):
        if word.startswith("--"):
            reading = word == "--rec"
        elif reading:
            recs.append(Path(word))
    return names_of(tuple(recs))
