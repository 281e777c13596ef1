"""Recipe `face` on vectors instead of images (docs/vectors.md): what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_fc.files import named
from partial_fc.flags import flag, is_given

if TYPE_CHECKING:
    from partial_fc.data import Source
    from partial_fc.evaluate.classification import NearestClass

    from .backbone import ModelFlags
    from .main import DataFlags
    from .tuning import TuningFlags

SUFFIXES = (".npz", ".npy", ".parquet")


def check(data: DataFlags, model: ModelFlags, tuning: TuningFlags) -> None:
    """Raises ValueError for data that this network does not take, and for flags about images and larger networks."""
    network = model.network
    if not model.takes_vectors:
        if any(rec.suffix in (".npz", ".npy") for rec in data.recs):
            raise ValueError(f"--rec {data.shown} has vectors: add --network none, linear or mlp:512")
        return
    if not data.recs or data.synthetic or any(rec.suffix not in (*SUFFIXES, ".sets") for rec in data.recs):
        what = f"--rec {data.shown}" if data.recs else f"--dataset {data.dataset}"
        raise ValueError(f"--network {network} takes vectors, .npz, .npy or .parquet; this run has {what}")
    for name in ("image_size", "mirror", "augment", "order", "apply"):
        if is_given(data, name):
            raise ValueError(f"{flag(name)} with --network {network}: it is about images; leave it out")
    for name in ("ema", "lora", "teacher") if network == "none" else ("lora",):
        if is_given(tuning, name):
            raise ValueError(f"{flag(name)} with --network {network}: it has no such layers; leave it out")


def open_tables(data: DataFlags, labels: int | Mapping[str, int]) -> Source:
    """Opens the vectors of --rec. labels: the most of a vector, of all sets or by the set's name. Raises ValueError for
    unusable files, and for images."""
    from partial_fc.data.sets.joined import open_sets, parts_of, tables_of

    source = open_sets(data.recs, data.num_classes, data.shared_classes, vectors=True, num_labels=labels)
    if not tables_of(source):
        raise ValueError(
            f"{parts_of(source)[0].where(0)}: an image; with --network none, linear and mlp expected vectors"
        )
    return source


def evaluations(data: DataFlags, source: Source, head: Any, labels: Mapping[str, int]) -> list[NearestClass]:
    """Returns those of --val-targets. labels: the most of a vector of each head's set; {}: there is one head. Raises
    ValueError for unusable files, for two of one name, and for class numbers that are not known to be the head's."""
    from partial_fc.data.sets.joined import Joined, tables_of
    from partial_fc.data.vectors import Vectors
    from partial_fc.evaluate.classification import NearestClass

    shards = source.shards if isinstance(source, Joined) else ()
    sets = {table.path: one for table, one in zip(tables_of(source), shards, strict=False)}
    found = []
    for target in data.val_targets or ():
        name, path = named(Path(target)) if labels else ("", Path(target))
        if path.suffix not in SUFFIXES:
            beside = next((file for file, one in sets.items() if one.name == name), tables_of(source)[0].path)
            path = beside.with_name(f"{path}{beside.suffix}")
        own = sets.get(path)
        name = name or (own.name if own else "")
        if labels and name not in labels:
            raise ValueError(
                f"--val-targets {target} with --rec {data.shown}: each set has a head of its own; name the set whose "
                f"classes it has, {next(iter(labels))}={target}"
            )
        if own and not labels and [*own.class_C] != [*range(len(own.class_C))]:
            raise ValueError(
                f"--val-targets {target} with --rec {data.shown}: the class numbers in the file of a set are its own; "
                "expected those of all sets together"
            )
        of = head.parts[name] if labels else head
        table = Vectors(path, of.num_classes, labels.get(name, data.labels))
        known = next((one.source for one in sets.values() if one.name == name), source) if labels else source
        # Of sets one after the other the names in the training have their set's before them.
        theirs = known.class_names() if labels or data.shared_classes or not sets else None
        for number, (own_name, there) in enumerate(zip(table.class_names() or (), theirs or (), strict=False)):
            if own_name != there:
                raise ValueError(
                    f"{path}: class {number} is {own_name!r}, {there!r} in --rec; expected the same numbers"
                )
        found.append((name, table, of))
    stems = Counter(table.path.stem for _, table, _ in found)
    titles = [f"{n}-{t.path.stem}" if n and stems[t.path.stem] > 1 else t.path.stem for n, t, _ in found]
    if twice := [title for title, number in Counter(titles).items() if number > 1]:
        raise ValueError(f"--val-targets has two files of the name {twice[0]}, by which results are kept; rename one")
    return [NearestClass(title, table, of) for title, (_, table, of) in zip(titles, found, strict=True)]
