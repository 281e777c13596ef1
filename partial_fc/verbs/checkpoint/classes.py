"""`partial-fc checkpoint classes`: adds, removes and merges the classes of a trained head, by name."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from partial_fc import printable
from partial_fc.data import ImageFolder
from partial_fc.data.image_folder import image_names
from partial_fc.data.sets.joined import open_sets
from partial_fc.printable import some

if TYPE_CHECKING:
    from torch import Tensor

    from partial_fc.checkpoint.read import Checkpoint

Names = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")]


@dataclass(frozen=True)
class ListOptions:
    """Prints number, name and last update of each class, separated by tabs; -: never updated."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A checkpoint, or a folder of checkpoints, of which the newest is used."""


@dataclass(frozen=True)
class _NewOptions(ListOptions):
    out: Path
    """The folder of the new checkpoint, for --resume."""


@dataclass(frozen=True, kw_only=True)
class _EmbeddingOptions(_NewOptions):
    """Of verbs that embed images of new classes."""

    trust_code: bool = False
    """Execute the FILE.py that builds the model, if it was trained with --network FILE.py:FUNCTION."""


@dataclass(frozen=True)
class AddOptions(_EmbeddingOptions):
    """New classes: sorted in by name if the present names are sorted, as in a folder of class folders, else after all
    others. A class with images starts at the mean direction of their embeddings by the checkpoint's network,
    with the length of trained centres; one without starts as an untrained class. Other rows are unchanged."""

    names: Names = ()
    """NAME, NAME=FOLDER of its images, or NAME=FILE.npy with embeddings of it, (N, D)."""
    names_file: Path | None = None
    """A file with more names, one a line."""
    images: Path | None = None
    """A folder with a sub-folder of images for each new class, named like the class."""


@dataclass(frozen=True)
class RemoveOptions(_NewOptions):
    """Removes classes; those after them are renumbered."""

    names: Names = ()
    """The classes to remove."""
    names_file: Path | None = None
    """A file with more names, one a line."""


@dataclass(frozen=True)
class MergeClassesOptions(_NewOptions):
    """Merges classes into one, which gets the mean of their directions and keeps its own length and optimizer state.
    (Its own direction alone would fit only its own images: they were trained as separate classes.)"""

    into: str
    """The class to keep."""
    names: Names = ()
    """The classes to merge into it."""


@dataclass(frozen=True)
class RenameOptions(_NewOptions):
    """Renames classes; nothing else changes."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OLD=NEW...")] = ()
    """The new names."""
    names_file: Path | None = None
    """A file with one name for each class, by number, one a line."""


@dataclass(frozen=True)
class MatchOptions(_EmbeddingOptions):
    """Matches the classes to those of a data set, in its order: new classes start from their images there; classes that
    it lacks are removed."""

    data: tuple[Path, ...]
    """--rec of the training that continues; its classes must have names."""
    shared_classes: bool = False
    """Its --shared-classes."""
    apply: Path | None = None
    """Its --apply: a merged class gets the mean direction of its parts, a new one that of its images."""


def list_classes(options: ListOptions) -> None:
    import torch

    stored = _open(options.folder)
    names, rows, size = stored.names(), stored.rows(), 1 << 16
    for start in range(0, len(names), size):
        stop = min(start + size, len(names))
        step_L = torch.zeros(stop - start, dtype=torch.int64)
        class_M = rows.created(start, stop).nonzero().squeeze(1) + start
        if "touched" in rows.columns:
            step_L[class_M - start] = rows.read(class_M, ["touched"])["touched"].flatten(1).amax(dim=1).long()
        for number, step in enumerate(step_L.tolist(), start):
            print(f"{number}\t{printable.name(names[number])}\t{step or '-'}")


def add(options: AddOptions) -> None:
    from partial_fc.verbs.checkpoint import imprint

    stored = _open(options.folder)
    starts = [word.partition("=")[::2] for word in _words(options.names, options.names_file)]  # (name, what it has)
    folder = ImageFolder(options.images) if options.images else None
    new = [name for name, _ in starts] + (folder.classes if folder else [])
    if not new:
        raise ValueError("no class to add: give NAME, --names-file or --images")
    taken = set(stored.names())
    for name in new:
        if not name or "\n" in name or "\r" in name:
            raise ValueError(f"a class cannot be named {name!r}")
        if name in taken:
            raise ValueError(f"class {name!r} exists already in {stored.where}")
        taken.add(name)
    directions = {name: _direction(stored, Path(start), options) for name, start in starts if start}
    if folder:
        by_label = imprint.directions(stored, folder, range(folder.num_classes), options.trust_code)
        directions |= {folder.classes[label]: direction_D for label, direction_D in by_label.items()}
    before = stored.names()
    pairs = [*zip(before, range(len(before)), strict=True), *((name, -1) for name in new)]
    if stored.class_names and before == sorted(before):
        pairs.sort(key=lambda pair: pair[0])
    names, old = map(list, zip(*pairs, strict=True))
    starting = {number: directions[name] for number, name in enumerate(names) if name in directions}
    made_by = f"{len(new)} classes added to {stored.where}: {some(new)}"
    _write(stored, options.out, made_by, names, old, starting)


def remove(options: RemoveOptions) -> None:
    stored = _open(options.folder)
    gone = _numbers(stored, _words(options.names, options.names_file))
    names = stored.names()
    kept = _all_but(gone, len(names))
    if not gone or not kept:
        raise ValueError(f"{len(gone)} of {len(names)} classes to remove; give at least one, and not all")
    made_by = f"{len(gone)} classes removed from {stored.where}: {some([names[n] for n in gone])}"
    _write(stored, options.out, made_by, [names[number] for number in kept], kept)


def merge_classes(options: MergeClassesOptions) -> None:
    stored = _open(options.folder)
    (into,) = _numbers(stored, [options.into])
    parts = _numbers(stored, options.names)
    if not parts or into in parts:
        raise ValueError(f"name the classes that become part of {options.into!r}: at least one, and not itself")
    names = stored.names()
    kept = _all_but(parts, len(names))
    joined = dict.fromkeys(parts, kept.index(into))
    made_by = f"classes {some([names[n] for n in parts])} of {stored.where} joined with {names[into]}"
    directions = _mean_directions(stored, joined | {into: kept.index(into)})
    _write(stored, options.out, made_by, [names[number] for number in kept], kept, directions, joined)


def rename(options: RenameOptions) -> None:
    from partial_fc.checkpoint.class_names import read_names

    stored = _open(options.folder)
    names = stored.names()
    renamed = read_names(options.names_file) if options.names_file else list(names)
    if len(renamed) != len(names):
        raise ValueError(f"{options.names_file} has {len(renamed)} names for {len(names)} classes")
    number_of = {name: number for number, name in enumerate(names)}
    for word in options.names:
        # Names may contain "=".
        cuts = [i for i, letter in enumerate(word) if letter == "=" and word[:i] in number_of]
        if len(cuts) != 1 or not word[cuts[0] + 1 :]:
            raise ValueError(f"{word!r}: expected OLD=NEW, with the name of one class of {stored.where}")
        renamed[number_of[word[: cuts[0]]]] = word[cuts[0] + 1 :]
    _by_name(renamed, "the new names", "give each class a name of its own")
    if renamed == names:
        raise ValueError("no class is renamed: give OLD=NEW, or --names-file")
    _write(stored, options.out, f"classes of {stored.where} renamed", renamed, list(range(len(names))))


def _apply(options: MatchOptions) -> None:
    from partial_fc.checkpoint.class_names import check_class_names, names_of
    from partial_fc.data.sets.changed import open_changed
    from partial_fc.verbs.checkpoint import imprint

    stored = _open(options.folder)
    assert options.apply
    source = open_changed(options.data, options.shared_classes, options.apply)
    before, changes = source.before, source.changes
    if before.num_classes != len(stored.names()):
        what = f"{stored.where} has {len(stored.names())} classes, the data {before.num_classes} before the changes"
        raise ValueError(f"{what}: give a checkpoint of a training on it")
    check_class_names(stored, before)
    names = names_of(source, source.num_classes) or [stored.names()[old] for old in changes.old_E.tolist()]
    kept = before.num_classes - len(changes.joined)
    joined = {old: int(changes.class_C[old]) for old in changes.joined}
    grown = joined | {int(changes.old_E[new]): new for new in set(joined.values())}
    directions = _mean_directions(stored, grown) if grown else {}
    directions |= imprint.directions(stored, source, range(kept, source.num_classes), options.trust_code)
    made_by = f"classes of {stored.where} changed by {options.apply}: {len(joined)} merged, {len(names) - kept} new"
    old = [*changes.old_E[:kept].tolist(), *([-1] * (len(names) - kept))]
    _write(stored, options.out, made_by, names, old, directions, joined)


def match(options: MatchOptions) -> None:
    from partial_fc.checkpoint.class_names import names_of
    from partial_fc.verbs.checkpoint import imprint

    if options.apply:
        _apply(options)
        return
    stored = _open(options.folder)
    source = open_sets(options.data, shared_classes=options.shared_classes, vectors=True)
    wanted, shown = names_of(source, source.num_classes), " ".join(map(str, options.data))
    if wanted is None:
        raise ValueError(
            f"{shown} has no names for its classes: expected a folder of class folders, or classes.txt (one "
            "name a line) beside the .rec"
        )
    _by_name(wanted, shown, "--shared-classes makes them one")
    number_of = _numbers_by_name(stored)
    old = [number_of.get(name, -1) for name in wanted]
    new = [number for number, before in enumerate(old) if before < 0]
    directions = imprint.directions(stored, source, new, options.trust_code)
    gone = len(number_of) - (len(old) - len(new))
    made_by = f"classes of {stored.where} made those of {shown}: {len(new)} new, {gone} gone"
    _write(stored, options.out, made_by, wanted, old, directions)


def _mean_directions(stored: "Checkpoint", new_of: dict[int, int]) -> "dict[int, Tensor]":
    """Returns the mean of the directions of the classes that become one, for those that training has moved. new_of:
    class -> new number. Raises ValueError for classes with several centres."""
    import torch
    from torch.nn.functional import normalize

    from partial_fc.checkpoint.rows_now import rows_now

    rows = rows_now(stored)
    if len(shape := rows.columns["centres"].shape) > 1:
        raise ValueError(
            f"{stored.where}: a class has {shape[0]} centres (--sub-centres), and no checkpoint says which its images "
            "are near. `checkpoint classes remove` all but one of those that are one, and train on"
        )
    created = [number for number in sorted(new_of) if bool(rows.created(number, number + 1))]
    total: dict[int, Tensor] = {}
    centre_MD = normalize(rows.read(torch.tensor(created), ["centres"])["centres"].double())
    for number, unit_D in zip(created, centre_MD, strict=True):
        total[new_of[number]] = total.get(new_of[number], torch.zeros(())) + unit_D
    return {new: normalize(sum_D, dim=0).float() for new, sum_D in total.items()}


def _open(folder: Path) -> "Checkpoint":
    from partial_fc.checkpoint.read import open_with_centres

    return open_with_centres(folder)


def _write(stored: "Checkpoint", out: Path, made_by: str, *plan: Any) -> None:
    """Writes the new checkpoint. plan: the fields of a Plan."""
    from partial_fc.verbs.checkpoint import remap_classes

    remap_classes.write(stored, remap_classes.Plan(*plan), out, made_by)


# ---- names


def _words(words: Iterable[str], file: Path | None) -> list[str]:
    from partial_fc.checkpoint.class_names import read_names

    return [*words, *(filter(None, read_names(file)) if file else ())]


def _by_name(names: Iterable[str], whose: str, remedy: str) -> dict[str, int]:
    """Maps names to class numbers. Raises ValueError for a duplicate name."""
    number_of: dict[str, int] = {}
    for number, name in enumerate(names):
        if number_of.setdefault(name, number) != number:
            raise ValueError(f"{whose}: classes {number_of[name]} and {number} are both named {name!r}; {remedy}")
    return number_of


def _numbers_by_name(stored: "Checkpoint") -> dict[str, int]:
    remedy = "rename one first: `partial-fc checkpoint classes rename --names-file`"
    return _by_name(stored.names(), stored.where, remedy)


def _numbers(stored: "Checkpoint", names: Iterable[str]) -> list[int]:
    """Returns the numbers of classes by name, ascending. Raises ValueError for an unknown or repeated name."""
    number_of = _numbers_by_name(stored)
    numbers = []
    for name in names:
        if name not in number_of:
            near = ", ".join(difflib.get_close_matches(name, number_of, 3))
            raise ValueError(f"{stored.where} has no class {name!r}{f'; there is {near}' if near else ''}")
        numbers.append(number_of[name])
    if len(set(numbers)) < len(numbers):
        raise ValueError("a class is named twice")
    return sorted(numbers)


def _all_but(gone: Iterable[int], count: int) -> list[int]:
    return sorted(set(range(count)) - set(gone))


def _direction(stored: "Checkpoint", path: Path, options: AddOptions) -> "Tensor":
    """Returns the direction of one class, from its embeddings or a folder of its images."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.embedding.sources import NO_CLASS, ImageFiles
    from partial_fc.verbs.checkpoint import imprint

    if path.suffix == ".npy":
        return imprint.from_file(path, tables_in(stored.manifest, stored.where)[""]["embedding_size"])
    if not path.is_dir():
        raise ValueError(f"{path}: expected a folder of images, or embeddings in a .npy file")
    if not (names := image_names(path)):
        raise ValueError(f"{path}: no image in it")
    images = ImageFiles(path, names)
    return imprint.directions(stored, images, (NO_CLASS,), options.trust_code)[NO_CLASS]
