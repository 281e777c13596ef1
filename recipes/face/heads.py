"""Several heads: `--rec image=A words=B --sample-rate words=0.1` names the sets, and each has a head of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from partial_fc import flags
from partial_fc.errors import UsageError
from partial_fc.files import named
from partial_fc.flags import Flags, HeadFlags, by_name, check_numbers
from partial_fc.flags.facts import LABELS, In

if TYPE_CHECKING:
    from partial_fc.data import Source
    from partial_fc.head import Heads
    from partial_fc.train.run import Run

_BATCH = "batch_size"  # of a process: the sum of the sets'
# What all heads have in common: the norm of the whole gradient.
_COMMON = {"head_clip"}


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


OWN = by_name.own_flags(HeadFlags, _SetFlags, common=_COMMON)


@dataclass(frozen=True)
class NamedHead:
    """The head of a set."""

    name: str
    flags: HeadFlags
    share: int  # the set's samples in a batch of a process; 0: not fixed
    labels: int  # the most of a sample
    drawn: int  # of them in a step; 0: all


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
    if nested := [name for name, path in map(named, recs) if path.suffix == ".sets"]:
        raise ValueError(
            f"--rec {nested[0]}=... is a file of sets, and a head is of one set; name its sets here instead"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--rec names {' and '.join(sorted(twice))} twice; a head's name is one set's")
    return names


def gathered(arguments: list[str]) -> list[str]:
    """Returns the command line with `--sample-rate words=0.1` as `--heads words.sample_rate=0.1`, and --batch-size as
    the sum of named ones. Raises ValueError for a name that --rec does not have, and for a flag of all heads."""
    names = names_of(tuple(map(Path, by_name.values_of(arguments, "--rec"))))
    if not names:
        return arguments
    kept, own = by_name.gathered(arguments, names, OWN, _COMMON)
    own = [*by_name.values_of(arguments, "--heads"), *own]
    sizes = {name: size for name, size in (one.split(f".{_BATCH}=") for one in own if f".{_BATCH}=" in one)}
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
    }.items():  # fmt: skip
        if given:
            raise ValueError(f"{name} with sets that have heads of their own ({', '.join(names)}); leave it out")
    words = by_name.of_each(data.heads, names, OWN)
    heads = [_parsed(name, tuple(words[name]), config.head, data.labels, data.labels_drawn) for name in names]
    if config.optim.accumulate > 1 and not any(one.share for one in heads):
        raise ValueError(
            f"--accumulate {config.optim.accumulate} with heads of which a micro-batch has as many rows as come: each "
            "mean is over a micro-batch's rows; give the number of each set's, --batch-size NAME=N NAME=N"
        )
    return heads


@cache  # a Config is checked whenever one is made, and a parser takes a quarter of a second
def _parsed(name: str, words: tuple[str, ...], head: HeadFlags, labels: int, drawn: int) -> NamedHead:
    of_all = ["--labels", str(labels), "--labels-drawn", str(drawn)]
    try:
        given = flags.parse(_OfSet, [*of_all, *words], "--heads", default=_OfSet(head=head, data=_SetFlags()))
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
    of_head = {one.name: one.labels for one in heads}
    assert all(shard.source.num_labels == of_head[shard.name] for shard in source.shards), of_head
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
