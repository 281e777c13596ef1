"""`partial-fc search`: identifies each probe by a search in a gallery."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from partial_fc import pictures
from partial_fc.checkpoint.files import as_json
from partial_fc.comm import World
from partial_fc.data import Source, open_on_all
from partial_fc.data.sample import still
from partial_fc.data.sets.joined import open_sets, tables_of
from partial_fc.findings import counted
from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.facts import In
from partial_fc.verbs.model.embed import ModelOptions, embed_labelled
from partial_fc.verbs.model.evaluate import output_folder

if TYPE_CHECKING:
    from partial_fc.embedding.model import EmbeddingModel
    from partial_fc.evaluate.identification import Found

_SHOWN = 5  # neighbours of a probe in the picture
_ROWS = 4  # probes of a kind in the picture


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ModelOptions):
    """Searches each image of --probe among those of --gallery: rank-1, rank-5, TPIR at FPIR (probes whose class is not
    in the gallery), P@1 and mAP@R. Writes search.json, and neighbours.png where there are images."""

    gallery: tuple[Path, ...]
    """The known images: a folder of class folders, a .rec, a list, or a table of `partial-fc embed`; or several."""
    probe: tuple[Path, ...] = ()
    """The images to search for, likewise; by default each image of the gallery is searched among the others."""
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
    """Embeddings with their classes. names: of (at least the first) classes; source: the images, or None."""

    path: str
    row_ND: NDArray[np.float32]
    label_N: NDArray[np.int64]
    names: list[str] | None
    source: Source | None

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
    gallery_label, probe_label = common_labels(gallery, probe)
    found = search(
        probe.row_ND, probe_label, gallery.row_ND, gallery_label, world, device,
        name="search", is_gallery=not options.probe, shown=_SHOWN,
    )  # fmt: skip
    if not folder:
        return
    values = dict(found.values())
    classes = len(np.unique(gallery_label))
    mates = int(found.has_mate_P.sum())
    print(
        f"gallery {gallery.path}: {counted(len(gallery_label), 'image')}, {counted(classes, 'class')}\n"
        f"probes {probe.path}: {counted(len(probe_label), 'image')}, {mates:,} with a class in the gallery"
    )
    print("\n".join(_lines(values, len(probe_label) - mates)))
    report: dict[str, Any] = {
        "model": str(model.source),
        "flip": model.flip,
        "gallery": {"path": gallery.path, "images": len(gallery_label), "classes": classes},
        "probe": {"path": probe.path, "images": len(probe_label), "with_mate": mates},
        "values": values,
    }
    (folder / "search.json").write_text(as_json(report))
    if gallery.source and probe.source:
        picture = _neighbours(found, gallery, probe, gallery_label, probe_label)
        pictures.write(folder / "neighbours.png", picture)
    else:
        print("neighbours.png is not drawn: a table of embeddings has no images")
    print(f"written: {folder}")


def _open(paths: Sequence[Path], name: str, model: "EmbeddingModel", options: SearchOptions, world: World) -> Labelled:
    source = open_on_all(lambda: open_sets(paths, shared_classes=options.shared_classes, vectors=True), world)
    row_ND, label_N = embed_labelled(model, source, world, options.batch_size, name)
    pictured = None if tables_of(source) else source
    return Labelled(" ".join(map(str, paths)), row_ND, label_N, source.class_names(), pictured)


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
    if len(measured) < len(FALSE_POSITIVE_RATES):
        missing = FALSE_POSITIVE_RATES[len(measured)]
        lines.append(
            f"  TPIR at FPIR {missing}: {num_unknown:,} probes have a class that is not in the gallery; "
            f"{round(1 / float(missing)):,} are needed"
        )
    return lines


def _neighbours(
    found: "Found", gallery: Labelled, probe: Labelled, gallery_label: NDArray[np.int64], probe_label: NDArray[np.int64]
) -> pictures.Pixels:
    """Draws each probe with its nearest images: green for the probe's class."""
    assert gallery.source is not None
    assert probe.source is not None
    top_P = found.cosine_PK[:, 0]
    kinds = {
        "wrong, the most confident": np.flatnonzero(found.has_mate_P & (found.rank_P != 1)),
        "right, the least confident": np.flatnonzero(found.rank_P == 1),
        "not in the gallery, the most similar": np.flatnonzero(~found.has_mate_P),
    }
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
                right = gallery_label[place] == probe_label[index]
                lines = [f"cos {cosine:.3f}", gallery.class_of(place)]
                colour = pictures.GREEN if right else pictures.RED
                tiles.append(pictures.Tile(_fitted(gallery.source, place), lines, colour))
        if tiles:
            rows.append(pictures.Row(f"{kind}: {len(probes):,} of {len(top_P):,} probes", tiles))
    return pictures.sheet(rows, 1 + _SHOWN)


def _fitted(source: Source, index: int) -> pictures.Pixels:
    from partial_fc.embedding.images import pixels_of

    return pictures.fit(pixels_of(still(source.read(index))))
