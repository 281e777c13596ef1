"""A training set with changed labels, `--apply changes.tsv`, and that table, which `partial-fc data clean` writes.

N images, K of them with a change, L of these left out; C classes of the set, E after the changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc import printable
from partial_fc.data.labels import check_inside
from partial_fc.data.sample import Sample, identity
from partial_fc.data.sets.joined import Joined, as_joined, open_sets
from partial_fc.file_kind import it_is
from partial_fc.files import regular, replacing

COLUMNS = "action", "image", "class", "to", "certainty", "why", "what"
_ABOUT = "# partial-fc data clean: "


class Change(NamedTuple):
    """A line of the table.

    move: an image is of class `to`. drop: an image is left out. split: an image is of a new class, with all others that
    go `to` the same number, C or more. merge: all of a class is of class `to`; image is -1, as `to` is in a drop.
    certainty: in [0, 1]; it and `why` are for people."""

    action: str
    image: int
    label: int
    to: int
    certainty: float
    why: str


class Changes(NamedTuple):
    """All of a table. image_K: ascending. to_K: the class, or -1. class_C: new numbers of the classes, and of split
    ones behind them. old_E: the class that each came from. joined: class -> that which it is merged into."""

    image_K: NDArray[np.int64]
    to_K: NDArray[np.int64]
    class_C: NDArray[np.int64]
    old_E: NDArray[np.int64]
    joined: dict[int, int]


def write_changes(path: Path, source: Joined, changes: Sequence[Change]) -> None:
    names = source.class_names() or []
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(f"{_ABOUT}{_about(source)}\n# To undo a change remove its line or put # before it.\n")
        file.write("\t".join(COLUMNS) + "\n")
        for one in changes:
            numbers = ("-" if number < 0 else str(number) for number in one[1:4])
            classes = " is ".join(names[label] for label in one[2:4] if 0 <= label < len(names))
            texts = one.why, source.where(one.image) if one.image >= 0 else classes
            file.write("\t".join((one.action, *numbers, f"{one.certainty:.3f}", *map(printable.name, texts))) + "\n")


def read_changes(path: Path, source: Joined) -> Changes:
    """Reads a table for the set that it was made for. Raises ValueError for the table of another one, and with the
    line for one that makes no sense."""
    of_image: dict[int, tuple[int, int, int]] = {}  # (class, to, line)
    joined: dict[int, int] = {}
    new: dict[int, int] = {}  # number of a split class -> where from
    with open(path, encoding="utf-8-sig", errors="replace", opener=regular) as file:
        about = file.readline().strip()
        if not about.startswith(_ABOUT):
            raise ValueError(f"{path}: expected what `partial-fc data clean` writes, got {about[:60]!r}{it_is(path)}")
        if about != f"{_ABOUT}{_about(source)}":
            raise ValueError(f"{path} was made for other data: {about.removeprefix(_ABOUT)}; --rec is {_about(source)}")
        for number, line in enumerate(file, start=2):
            fields = line.rstrip("\r\n").split("\t")
            if not line.strip() or line.startswith("#") or tuple(fields[:4]) == COLUMNS[:4]:
                continue
            try:
                action, image, label, to = _parsed(fields, len(source), source.num_classes)
                if action == "merge":
                    _merge(joined, label, to)
                    continue
                if image in of_image:
                    raise ValueError(f"image {image} has a change on line {of_image[image][2]} already")
                if action == "split":
                    new.setdefault(to, label)
                of_image[image] = label, to, number
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    image_K = np.array(sorted(of_image), np.int64)
    label_K, to_K, line_K = np.array([of_image[i] for i in image_K.tolist()], np.int64).reshape(-1, 3).T
    found_K = source.labels()[image_K]
    for at in np.flatnonzero(found_K != label_K)[:1].tolist():
        what = f"image {image_K[at]} is of class {found_K[at]}, not {label_K[at]}"
        raise ValueError(f"{path}, line {line_K[at]}: {what}")
    number_of = {to: source.num_classes + place for place, to in enumerate(sorted(new))}
    to_K = np.array([number_of.get(to, to) for to in to_K.tolist()], np.int64)
    kept = [label for label in range(source.num_classes) if label not in joined]
    old_E = np.array([*kept, *(new[to] for to in sorted(new))], np.int64)
    class_C = np.empty(source.num_classes + len(new), np.int64)
    class_C[kept], class_C[source.num_classes :] = range(len(kept)), range(len(kept), len(old_E))
    for label in joined:
        class_C[label] = class_C[root_of(joined, label)]
    return Changes(image_K, to_K, class_C, old_E, joined)


def _about(source: Joined) -> str:
    """Tells which data it is, without quotes and commas, for which a spreadsheet would quote the whole line."""
    return "; ".join(f"{name} {value}" for name, value in {**identity(source), "classes": source.num_classes}.items())


def _parsed(fields: Sequence[str], num_images: int, num_classes: int) -> tuple[str, int, int, int]:
    """Returns (action, image, class, to)."""
    last = 2 * num_classes + num_images
    ranges = {
        "move": (range(num_images), range(num_classes), range(num_classes)),
        "drop": (range(num_images), range(num_classes), None),
        "split": (range(num_images), range(num_classes), range(num_classes, last)),
        "merge": (None, range(num_classes), range(num_classes)),
    }
    if len(fields) < 4 or fields[0] not in ranges:
        raise ValueError(f"expected {', '.join(ranges)}, and image, class and to, between tabs; got {fields[:4]}")
    numbers = []
    for name, text, allowed in zip(COLUMNS[1:4], fields[1:4], ranges[fields[0]], strict=True):
        if allowed is None:
            numbers.append(-1)
            continue
        if not text.strip().isdecimal() or int(text) not in allowed:
            raise ValueError(f"{fields[0]}: {name} is {text!r}; expected {allowed[0]} to {allowed[-1]}")
        numbers.append(int(text))
    return fields[0], *numbers  # type: ignore[return-value]


def _merge(joined: dict[int, int], label: int, to: int) -> None:
    if label in joined:
        raise ValueError(f"class {label} is merged into {joined[label]} already")
    if root_of(joined, to) == label:
        raise ValueError(f"class {label} would be merged into itself")
    joined[label] = to


def root_of(joined: Mapping[int, int], label: int) -> int:
    """Returns the class that a class is merged into, or itself."""
    while label in joined:
        label = joined[label]
    return label


class Changed(Joined):
    """A set with changed labels, without the images that are left out, in their order. before: the set as it was."""

    def __init__(self, source: Joined, changes: Changes) -> None:
        out_L = changes.image_K[changes.to_K < 0]
        stops = np.cumsum([0, *(count for _, count, _ in source.sets)])
        left = np.diff(stops - np.searchsorted(out_L, stops)).tolist()
        sets = [(name, count, weight) for (name, _, weight), count in zip(source.sets, left, strict=True)]
        if (names := source.class_names()) is not None:
            names = [*names, *map(str, range(len(names), source.num_classes))]
            own, kept = [names[old] for old in changes.old_E.tolist()], source.num_classes - len(changes.joined)
            names = own[:kept] + [f"{name} ({number})" for number, name in enumerate(own[kept:], start=2)]
        super().__init__(source.shards, sets, len(changes.old_E), names)
        self.before, self.changes = source, changes
        self._before_L = out_L - np.arange(len(out_L))

    def __len__(self) -> int:
        return len(self.before) - len(self._before_L)

    def _old(self, index: Any) -> Any:
        """Returns places in the set as it was."""
        return index + np.searchsorted(self._before_L, index, side="right")

    def _now(self, old_B: NDArray[np.int64], label_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the classes of samples of the set as it was, with these classes there."""
        image_K, to_K, class_C, _, _ = self.changes
        place_B = np.searchsorted(image_K, old_B)
        has_B = (place_B < len(image_K)) & (np.append(image_K, -1)[place_B] == old_B)
        return class_C[np.where(has_B, np.append(to_K, -1)[place_B], label_B)]

    def read(self, index: int) -> Sample:
        old = int(self._old(index))
        sample = self.before.read(old)
        return sample._replace(label=int(self._now(np.array(old), np.array(sample.label))), key=index)

    def read_batch(self, index_B: NDArray[np.int64]) -> tuple[NDArray, NDArray[np.int64], NDArray[np.int64]] | None:
        old_B = self._old(index_B)
        part = self.before.read_batch(old_B)
        if part is None or not ((part[1] >= 0) & (part[1] < self.before.num_classes)).all():
            return None  # reading them singly tells which
        return part[0], self._now(old_B, part[1]), index_B

    def where(self, index: int) -> str:
        return self.before.where(int(self._old(index)))

    def key(self, index: int) -> str:
        return self.before.key(int(self._old(index)))

    def will_need(self, indices: Sequence[int]) -> None:
        self.before.will_need(self._old(np.asarray(indices)).tolist())

    def read_ahead(self, first: int, stop: int) -> None:
        self.before.read_ahead(int(self._old(first)), int(self._old(stop - 1)) + 1)

    def layout(self) -> Iterator[NDArray[Any] | bytes]:
        yield from self.before.layout()
        yield from self.changes[:3]

    def labels(self) -> NDArray[np.int64]:
        label_N = self.before.labels()
        check_inside(label_N, self.before)
        old_M = self._old(np.arange(len(self)))
        return self._now(old_M, label_N[old_M])


def open_changed(paths: Sequence[Path], shared_classes: bool, changes: Path) -> Changed:
    """Opens sets as `open_sets` does, with the changes of a table. Raises ValueError as `read_changes`, too."""
    source = as_joined(paths, open_sets(paths, shared_classes=shared_classes))
    return Changed(source, read_changes(changes, source))
