"""`partial-fc data clean`: a table of wrong labels of a training set, found by a trained model, and a page to look at.

N images, M of them that can be used, D feature width, K neighbours.
"""

import base64
import io
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc.comm import World
from partial_fc.data import open_on_all
from partial_fc.data.check.contradictions import NEIGHBOURS, find_changes
from partial_fc.data.labels import check_inside
from partial_fc.data.sample import BadRecord, still
from partial_fc.data.sets.changed import Change, write_changes
from partial_fc.data.sets.joined import Joined, as_joined
from partial_fc.embedding.sources import has_classes, open_images
from partial_fc.files import check_new, replacing
from partial_fc.findings import counted
from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.facts import BATCH, In
from partial_fc.verbs.model.embed import ModelOptions, print_left_out

_SHOWN = 100  # changes of a kind on the page, the most certain and as many of the least
_EACH = 4  # images of a class beside one
_SIDE = 72  # pixels
_TITLES = {
    "merge": "Classes that are one",
    "move": "Images of another class",
    "drop": "Images that are like no class",
    "split": "Classes that are two",
}


@dataclass(frozen=True, kw_only=True)
class CleanOptions(ModelOptions):
    """Finds wrong labels in a training set by the embeddings of a model, mostly one that was trained on it: images of
    another class, classes that are one, and classes that are two. Writes changes.tsv, for --apply of a training,
    weights.npy, for --sample-weights, and index.html, with pictures. The data stays as it is. On all ranks of
    horovodrun, torchrun and so on, or of --gpus."""

    sets: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SETS...")]
    """The training set, as in its --rec: a .rec (or its folder), class folders, a list, ...; or several."""
    shared_classes: bool = False
    """As in the training."""
    out: Path
    """The folder to write."""
    batch_size: Annotated[int, In(BATCH)] = 64
    """Images in one forward of the network."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.sets:
            raise ValueError("SETS is missing: the training set")


def clean(options: CleanOptions, world: World, device: Any) -> None:
    from partial_fc.embedding.on_ranks import embedded, why_bad
    from partial_fc.evaluate.identification import search

    table = options.out / "changes.tsv"
    if world.rank == 0:
        check_new(table)  # somebody may have edited it
        options.out.mkdir(parents=True, exist_ok=True)
    model = options.load(device)
    source = open_on_all(lambda: open_images(options.sets, options.shared_classes), world)
    if not has_classes(source):
        raise ValueError(f"{options.sets[0]}: images without classes; expected a training set")
    source = as_joined(options.sets, source)
    check_inside(label_N := source.labels(), source)
    if world.rank == 0:
        print_left_out(source)
    row_ND, bad = np.empty((len(source), model.embedding_size), np.float32), []
    for part in embedded(model, source, world, options.batch_size, bar="embed"):
        row_ND[part.first : part.first + len(part.row_ID)] = part.row_ID
        bad += part.bad
    usable_M = np.delete(np.arange(len(source)), bad)
    if len(usable_M) < 2:
        raise ValueError(f"{options.sets[0]}: {counted(len(usable_M), 'image')} can be used; expected 2 or more")
    row_MD, label_M = row_ND[usable_M], label_N[usable_M]
    near_MK = search(
        row_MD, None, row_MD, label_M, world, device,
        name="neighbours", is_gallery=True, shown=min(NEIGHBOURS, len(usable_M) - 1), bar="neighbours",
    ).neighbour_PK  # fmt: skip
    if world.rank:
        return
    found = find_changes(row_MD, label_M, near_MK, source.num_classes, bar="classes")
    changes = [one._replace(image=int(usable_M[one.image]) if one.image >= 0 else -1) for one in found]
    changes += [
        Change("drop", index, int(label_N[index]), -1, 1.0, f"cannot be used: {why_bad(model, source, index)}")
        for index in bad
    ]
    write_changes(table, source, changes)
    weight_N = np.ones(len(source), np.float32)
    weight_N[[one.image for one in changes if one.image >= 0]] = 0
    with replacing(options.out / "weights.npy") as path, path.open("wb") as file:
        np.save(file, weight_N)
    number, commands = Counter(one.action for one in changes), _commands(options)
    halves = len({one.to for one in changes if one.action == "split"})
    said = [
        f"of {counted(source.num_classes, 'class')}: {number['merge']:,} become part of another, {halves:,} become two "
        f"({counted(number['split'], 'image')} in the new ones)",
        f"of {counted(len(source), 'image')}: {number['move']:,} move to another, {number['drop']:,} are left out",
    ]
    page = _page(_Shown(source, label_N, usable_M, near_MK), changes, said, commands)
    with replacing(options.out / "index.html") as path:
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    print(*said, sep="\n")
    print(f"pictures: {options.out / 'index.html'}; the changes, of which any line may be removed: {table}")
    print(*commands, sep="\n")


def _commands(options: CleanOptions) -> list[str]:
    sets = shlex.join(map(str, options.sets)) + " --shared-classes" * options.shared_classes
    apply = f"--apply {shlex.quote(str(options.out / 'changes.tsv'))}"
    start, model = (shlex.quote(str(path)) for path in (options.out / "start", options.model))
    return [
        f"train anew:   partial-fc train face --rec {sets} {apply}",
        f"or go on:     partial-fc checkpoint classes match {model} --data {sets} {apply} --out {start}",
        f"              partial-fc train face --rec {sets} {apply} --resume {start}",
        "each with the other flags of the first training; to go on, with more --epochs and a --models-root of its own",
    ]


# ---- the page


class _Shown(NamedTuple):
    source: Joined
    label_N: NDArray[np.int64]
    usable_M: NDArray[np.int64]
    near_MK: NDArray[np.int64]

    def near(self, image: int) -> list[int]:
        """Returns the neighbours of an image, the nearest first; [] of one that cannot be used."""
        at = np.flatnonzero(self.usable_M == image)
        return self.usable_M[self.near_MK[at]].flatten().tolist()

    def name(self, label: int) -> str:
        names = self.source.class_names() or ()
        return f"{label} ({names[label]})" if 0 <= label < len(names) else str(label)

    def group(self, caption: str, images: Iterable[int]) -> tuple[str, list[str]]:
        return caption, [self.picture(image) for image in images]

    def of_class(self, label: int, but: Iterable[int] = (), near: int = -1) -> tuple[str, list[str]]:
        """Shows images of a class: those among the neighbours of one first."""
        every = np.setdiff1d(np.flatnonzero(self.label_N == label), [*but])
        first = [i for i in self.near(near) if self.label_N[i] == label]
        chosen = dict.fromkeys([*first, *every.tolist()])
        return self.group(f"class {self.name(label)}", [*chosen][:_EACH])

    def picture(self, image: int) -> str:
        """Returns the URL; "" for what is no picture."""
        from PIL import Image

        from partial_fc import pictures
        from partial_fc.embedding.images import pixels_of

        try:
            pixels = pictures.fit(pixels_of(still(self.source.read(image))), _SIDE)
        except BadRecord:
            return ""
        jpeg = io.BytesIO()
        Image.fromarray(pixels).save(jpeg, "JPEG", quality=85)
        return f"data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}"

    def row(self, change: Change, images: list[int]) -> tuple[str, str, list[tuple[str, list[str]]]]:
        """Returns (title, why, groups of pictures with a caption). images: all of the change."""
        action, image, label, to, certainty, why = change
        if action == "merge":
            title, groups = f"class {self.name(label)} is {self.name(to)}", [self.of_class(label), self.of_class(to)]
        elif action == "split":
            title, groups = f"class {self.name(label)} is two", [self.group("the new one", images[:_EACH])]
            groups.append(self.of_class(label, but=images))
        else:
            is_of = f"moves to class {self.name(to)}" if action == "move" else "is left out"
            title = f"{self.source.where(image)} {is_of}"
            groups = [self.group("this image", [image]), self.of_class(label, but=[image], near=image)]
            near = self.group("its neighbours", self.near(image)[:_EACH])
            groups.append(self.of_class(to, near=image) if to >= 0 else near)
        return title, f"{certainty:.2f}: {why}", groups


def _page(shown: _Shown, changes: list[Change], said: list[str], commands: list[str]) -> str:
    import jinja2

    loader = jinja2.PackageLoader("partial_fc.verbs", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    sections = [section for action in _TITLES for section in _sections(shown, changes, action)]
    return environment.get_template("data/clean.html").render(said=said, commands=commands, sections=sections)


def _sections(shown: _Shown, changes: list[Change], action: str) -> Iterator[tuple[str, list[Any]]]:
    """Yields (title, rows): the most and the least certain changes."""
    grouped: dict[int, list[Change]] = {}
    for number, one in enumerate(changes):
        if one.action == action:
            grouped.setdefault(one.to if action == "split" else number, []).append(one)
    rows = [(group[0], [one.image for one in group]) for group in grouped.values()]
    for which, some in (("the most certain", rows[:_SHOWN]), ("the least certain", rows[_SHOWN:][-_SHOWN:])):
        if some:
            yield f"{_TITLES[action]}: {which}, {len(some)} of {len(rows):,}", [shown.row(*row) for row in some]
