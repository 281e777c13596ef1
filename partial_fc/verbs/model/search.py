"""`partial-fc search`: identifies each probe by a search in a gallery."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from partial_fc import pictures, printable
from partial_fc.checkpoint.files import as_json
from partial_fc.comm import World
from partial_fc.data import Source, open_on_all
from partial_fc.data.sample import still
from partial_fc.data.sets.joined import tables_of
from partial_fc.embedding.sources import has_classes, open_images
from partial_fc.files import replacing
from partial_fc.findings import counted
from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.facts import In
from partial_fc.verbs.model.embed import ModelOptions, embed_labelled, print_left_out
from partial_fc.verbs.model.evaluate import output_folder

if TYPE_CHECKING:
    from partial_fc.embedding.model import EmbeddingModel
    from partial_fc.evaluate.identification import Found

_SHOWN = 5  # neighbours of a probe in the picture, the table and on the terminal
_ROWS = 4  # probes of a kind in the picture
_PRINTED = 20  # probes without classes on the terminal


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ModelOptions):
    """Searches each image of --probe among those of --gallery. Without classes, as a photo of somebody: prints the
    nearest images. With classes: rank-1, rank-5, TPIR at FPIR (probes whose class is not in the gallery), P@1 and
    mAP@R. Writes neighbours.csv, search.json, and neighbours.png where there are images."""

    gallery: tuple[Path, ...]
    """The known images: a folder of class folders, a .rec, a list, or a table of `partial-fc embed`; or several. Image
    files, or a folder of them, are each a class of its own."""
    probe: tuple[Path, ...] = ()
    """The images to search for, likewise; by default each image of the gallery is searched among the others."""
    threshold: Annotated[float | None, In("[-1, 1]")] = None
    """A probe whose nearest image has a smaller cosine is `unknown`. `partial-fc evaluate` finds the one to use."""
    shared_classes: bool = False
    """Classes that have the same name in several sets, or in sets without names the same number, are one class."""
    batch_size: Annotated[int, In(1)] = 128
    """Images in one forward of the network."""
    out: Path | None = None
    """The output folder; by default `search` in the run's folder, or beside the model's file."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.gallery:
            raise ValueError("--gallery is missing: the images to search in")
        if self.probe == self.gallery:
            raise ValueError("--probe is --gallery: leave --probe away, and each image is searched among the others")


@dataclass
class Labelled:
    """Embeddings with their classes. names: of (at least the first) classes; source: the images, or table. labelled:
    False: each image is a class of its own, of its key's name."""

    path: str
    row_ND: NDArray[np.float32]
    label_N: NDArray[np.int64]
    names: list[str] | None
    source: Source
    labelled: bool = True

    def class_of(self, index: int) -> str:
        return _name(self.names, int(self.label_N[index]))


def search_faces(options: SearchOptions, world: World, device: Any) -> None:
    from partial_fc.evaluate.identification import search

    folder = output_folder(options.out, options.model, "search") if world.rank == 0 else None
    model = options.load(device)
    if folder:
        print(model, flush=True)
    gallery = _open(options.gallery, "gallery", model, options, world)
    probe = gallery if not options.probe else _open(options.probe, "probe", model, options, world)
    if gallery.row_ND.shape[1] != probe.row_ND.shape[1]:
        raise ValueError(
            f"{gallery.path} has embeddings of {gallery.row_ND.shape[1]} numbers, {probe.path} of "
            f"{probe.row_ND.shape[1]}; both must come from one model"
        )
    labelled = gallery.labelled and probe.labelled
    gallery_label, probe_label = common_labels(gallery, probe) if labelled else (gallery.label_N, None)
    found = search(
        probe.row_ND, probe_label, gallery.row_ND, gallery_label, world, device,
        name="search", is_gallery=not options.probe, shown=_SHOWN,
    )  # fmt: skip
    if not folder:
        return
    images, classes, num_probes = len(gallery_label), len(np.unique(gallery_label)), len(probe.row_ND)
    print(f"gallery {gallery.path}: {counted(images, 'image')}, {counted(classes, 'class')}")
    values, mates = dict(found.values()) if labelled else {}, int(found.has_mate_P.sum())
    in_gallery = f", {mates:,} with a class in the gallery" if labelled else ""
    lines = _lines(values, num_probes - mates) if labelled else ()
    print(f"probes {probe.path}: {counted(num_probes, 'image')}{in_gallery}", *lines, sep="\n")
    least = -np.inf if options.threshold is None else options.threshold
    if not labelled or options.threshold is not None:
        for (key, answer, *near), _ in zip(_answers(found, gallery, probe, least), range(_PRINTED), strict=False):
            print(f"{printable.name(key)}: {printable.name(answer)}")
            for cls, image, cosine in zip(near[::3], near[1::3], near[2::3], strict=True):
                print(f"  {float(cosine):7.4f}", *map(printable.name, dict.fromkeys((cls, image))), sep="  ")
        if num_probes > _PRINTED:
            print(f"... and {num_probes - _PRINTED:,} more, in neighbours.csv")
        if options.threshold is None:
            print("Without --threshold nobody is unknown; `partial-fc evaluate` finds the one to use.")
    report: dict[str, Any] = {
        "model": str(model.source),
        "flip": model.flip,
        "gallery": {"path": gallery.path, "images": images, "classes": classes},
        "probe": {"path": probe.path, "images": num_probes, "with_mate": mates if labelled else None},
        "threshold": options.threshold,
        "values": values,
    }
    (folder / "search.json").write_text(as_json(report))
    table = folder / "neighbours.csv"
    with replacing(table) as partial, partial.open("w", -1, "utf-8", "surrogateescape", newline="") as file:
        columns = [f"{name}{number}" for number in range(1, _SHOWN + 1) for name in ("class", "image", "cosine")]
        csv.writer(file).writerow(["probe", "answer", *columns])
        csv.writer(file).writerows(_answers(found, gallery, probe, least))
    if tables_of(gallery.source) or tables_of(probe.source):
        print("neighbours.png is not drawn: a table of embeddings has no images")
    else:
        picture = _neighbours(found, gallery, probe, gallery_label, probe_label, least)
        pictures.write(folder / "neighbours.png", picture)
    print(f"written: {folder}")


def _open(paths: Sequence[Path], name: str, model: "EmbeddingModel", options: SearchOptions, world: World) -> Labelled:
    source = open_on_all(lambda: open_images(paths, options.shared_classes), world)
    if world.rank == 0:
        print_left_out(source)
    row_ND, label_N = embed_labelled(model, source, world, options.batch_size, name)
    path, labelled, names = " ".join(map(str, paths)), has_classes(source), source.class_names()
    if not labelled:
        label_N, names = np.arange(len(source)), [source.key(index) for index in range(len(source))]
    return Labelled(path, row_ND, label_N, names, source, labelled)


def common_labels(gallery: Labelled, probe: Labelled) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns labels that are comparable: by class names if both have them, else by number."""
    if gallery is probe:
        return gallery.label_N, probe.label_N
    if (gallery.names is None) != (probe.names is None):
        named, numbered = (gallery, probe) if probe.names is None else (probe, gallery)
        raise ValueError(
            f"{named.path} names its classes, {numbered.path} has numbers only, which cannot be matched; "
            "give two folders of class folders, or two .rec packed with the same list of classes"
        )
    if gallery.names is None:
        return gallery.label_N, probe.label_N
    numbers: dict[str, int] = {}
    both = []
    for one in (gallery, probe):
        labels, place_N = np.unique(one.label_N, return_inverse=True)
        known = [numbers.setdefault(_name(one.names, label), len(numbers)) for label in labels.tolist()]
        both.append(np.array(known, np.int64)[place_N])
    return both[0], both[1]


def _name(names: list[str] | None, label: int) -> str:
    return names[label] if names is not None and 0 <= label < len(names) else f"class {label}"


def _answers(found: "Found", gallery: Labelled, probe: Labelled, least: float) -> Iterator[list[str]]:
    """Yields, for each probe, its key, the answer, and class, image and cosine of each of its nearest images."""
    for index, (places, cosines) in enumerate(zip(found.neighbour_PK.tolist(), found.cosine_PK.tolist(), strict=True)):
        is_known = places[0] >= 0 and cosines[0] >= least
        row = [probe.source.key(index), gallery.class_of(places[0]) if is_known else "unknown"]
        for place, cosine in zip(places, cosines, strict=True):
            row += [gallery.class_of(place), gallery.source.key(place), f"{cosine:.6f}"] if place >= 0 else []
        yield row


def _lines(values: dict[str, float], num_unknown: int) -> list[str]:
    from partial_fc.evaluate.identification import FALSE_POSITIVE_RATES

    lines = [
        f"  rank-1 (P@1) {values['rank1']:.2%}, 95 % interval {values['rank1_low']:.2%} to {values['rank1_high']:.2%}",
        f"  rank-5       {values['rank5']:.2%}",
        f"  mAP@R        {values['map@r']:.2%}",
    ]
    measured = [far for far in FALSE_POSITIVE_RATES if np.isfinite(values[f"tpir@fpir={far}"])]
    lines += [
        f"  TPIR at FPIR {far}: {values[f'tpir@fpir={far}']:.2%} with cosine > {values[f'threshold@fpir={far}']:.4f}"
        for far in measured
    ]
    if num_unknown and len(measured) < len(FALSE_POSITIVE_RATES):
        missing = FALSE_POSITIVE_RATES[len(measured)]
        lines.append(
            f"  TPIR at FPIR {missing}: {counted(num_unknown, 'probe')} of a class that is not in the gallery; "
            f"{round(1 / float(missing)):,} are needed"
        )
    return lines


def _neighbours(
    found: "Found", gallery: Labelled, probe: Labelled, gallery_label: NDArray[np.int64],
    probe_label: NDArray[np.int64] | None, least: float,
) -> pictures.Pixels:  # fmt: skip
    """Draws probes with their nearest images: green for its class or, without classes, from the cosine `least` on."""
    top_P = found.cosine_PK[:, 0]
    kinds = {
        "wrong, the most confident": np.flatnonzero(found.has_mate_P & (found.rank_P != 1)),
        "right, the least confident": np.flatnonzero(found.rank_P == 1),
        "not in the gallery, the most similar": np.flatnonzero(~found.has_mate_P),
    }
    if probe_label is None:
        kinds = {"the most similar": np.arange(len(top_P))}
    rows = []
    for kind, probes in kinds.items():
        sign = 1 if kind.startswith("right") else -1
        tiles = []
        for index in probes[np.argsort(sign * top_P[probes], kind="stable")][:_ROWS].tolist():
            tiles.append(pictures.Tile(_fitted(probe.source, index), ["probe", probe.class_of(index)]))
            for place, cosine in zip(found.neighbour_PK[index].tolist(), found.cosine_PK[index].tolist(), strict=True):
                if place < 0:
                    tiles.append(pictures.Tile(np.full((pictures.SIDE, pictures.SIDE, 3), 24, np.uint8)))
                    continue
                right = cosine >= least if probe_label is None else gallery_label[place] == probe_label[index]
                lines = [f"cos {cosine:.3f}", gallery.class_of(place)]
                colour = pictures.GREEN if right else pictures.RED
                tiles.append(pictures.Tile(_fitted(gallery.source, place), lines, colour))
        if tiles:
            rows.append(pictures.Row(f"{kind}: {len(probes):,} of {len(top_P):,} probes", tiles))
    return pictures.sheet(rows, 1 + _SHOWN)


def _fitted(source: Source, index: int) -> pictures.Pixels:
    from partial_fc.embedding.images import pixels_of

    return pictures.fit(pixels_of(still(source.read(index))))
