"""`partial-fc evaluate`: a trained model's accuracy on pairs, and the threshold to use."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import pictures
from partial_fc.checkpoint.files import as_json
from partial_fc.checkpoint.folders import is_step, newest
from partial_fc.comm import World, all_or_raise
from partial_fc.data import open_on_all
from partial_fc.data.decode import decode
from partial_fc.data.sets.joined import open_sets
from partial_fc.evaluate import roc
from partial_fc.evaluate.roc import Roc
from partial_fc.file_kind import it_is
from partial_fc.findings import check_writable, counted
from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.facts import In
from partial_fc.verbs.data.pair_list import PairList, read_pair_list
from partial_fc.verbs.model.embed import ModelOptions, embed_labelled, embed_together

if TYPE_CHECKING:
    import torch

    from partial_fc.embedding.model import EmbeddingModel

FALSE_ACCEPT_RATES = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6")
_ACROSS = 5  # pairs per row of the picture
_SIDES = ("new, new", "new, old", "old, old")  # of --against: query and gallery
# With one more column of 11 it fits into 80 columns.
_HEAD = f"  {'threshold':12}{'cosine >=':>10}{'distance² <=':>13}{'right':>8}{'same accepted':>14}{'different':>10}"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Measures a model on pairs of images: accuracy, TAR at FAR, the threshold to use and what it gives. Writes
    evaluation.json, roc.png and the worst pairs of each set."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None  # type: ignore[assignment]
    """A trained model, as for `embed`."""
    sets: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SET ...]")] = ()
    """Pairs: InsightFace's .bin, a .parquet with the columns image1, image2 and label, a CSV file with
    `path,path,same` or `path,path,different` a line, or LFW's pairs.txt."""
    root: Path | None = None
    """The folder that paths of lists are relative to; by default each file's own folder."""
    ijb: Path | None = None
    """The folder of IJB-B or IJB-C (meta, loose_crop), as InsightFace publishes it: 1:1, and 1:N where its lists are
    there."""
    target: Literal["IJBB", "IJBC"] = "IJBC"
    """The target of --ijb."""
    all_pairs: tuple[Path, ...] = ()
    """Labelled images, each compared with all others: TAR at FAR 1e-4 to 1e-6. A folder of class folders, a .rec, a
    list, or a table of `partial-fc embed`, which needs no MODEL; or several."""
    shared_classes: bool = False
    """--all-pairs: classes that have the same name in several sets, or in sets without names the same number, are one
    class."""
    against: Path | None = None
    """An older model: also TAR at FAR of this model's embeddings searched among those that the older one has made
    (--compatible-with), on SETs and --all-pairs."""
    batch_size: Annotated[int, In(1)] = 128
    """Images in one forward of the network."""
    show: int = 10
    """Pairs of each kind in the picture of the worst pairs; 0: no picture."""
    out: Path | None = None
    """The output folder; by default `evaluation` in the run's folder, or beside the model's file."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.sets and self.ijb is None and not self.all_pairs:
            raise ValueError("nothing to evaluate on: give a .bin, a CSV file of pairs, --ijb DIR, or --all-pairs SET")
        if self.model is None and (self.sets or self.ijb):
            raise ValueError("MODEL is missing; only tables of `partial-fc embed`, after --all-pairs, need none")
        if self.against and (self.model is None or not (self.sets or self.all_pairs)):
            raise ValueError("--against compares two models on pairs: give MODEL, and SETs or --all-pairs")
        names = [path.stem for path in self.sets] + ([self.target] if self.ijb else [])
        if len(set(names)) < len(names):
            raise ValueError(f"two sets have the same name, of {', '.join(names)}; rename one")
        for path in (*self.sets, *([self.ijb] if self.ijb else [])):
            if not path.exists():
                raise ValueError(f"{path} not found; expected a .bin or .csv of pairs, or --ijb DIR")
        for path in self.sets:
            if path.suffix not in (".bin", ".parquet", ".csv", ".tsv", ".txt"):
                hint = f": images of classes are given as --all-pairs {path}" if path.is_dir() else it_is(path)
                raise ValueError(f"{path}: expected a .bin or .parquet of pairs, or a .csv, .tsv or .txt of them{hint}")


@dataclass
class Judged:
    """The results of a set. values: by name, without the set's. pixels, caption: of a pair, for the picture."""

    name: str
    distance_N: NDArray[np.float64]
    same_N: NDArray[np.bool_]
    roc: Roc
    values: dict[str, float]
    row_MD: NDArray[Any]  # the embeddings of its images
    pair_N2: NDArray[np.int64]
    pixels: Callable[[int], tuple[pictures.Pixels, pictures.Pixels]] | None = None
    caption: Callable[[int], list[str]] = lambda pair: []
    folds: int = 10


def output_folder(out: Path | None, model: Path, name: str) -> Path:
    """Creates a verb's output folder: --out, or beside the model or its checkpoints. Raises ValueError if it fails."""
    beside = model if model.is_dir() else model.parent
    if is_step(beside):
        beside = beside.parent
    if newest(beside):
        beside = beside.parent
    folder = out or beside / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be created: {error.strerror}; give another --out") from None
    check_writable(folder / "any")
    return folder


def evaluate(options: EvaluateOptions, world: World, device: Any) -> None:
    folder = None
    if world.rank == 0:
        folder = output_folder(options.out, options.model or options.all_pairs[0], "evaluation")
    model = options.load(device) if options.model else None
    report: dict[str, Any] = {"model": str(model.source) if model else None, "flip": model.flip if model else None}
    if folder and model:
        print(model, flush=True)
    judged = []
    for one in _judged(options, model, world, device) if model else ():
        judged.append(one)
        if folder:
            print("\n".join(_lines(one, _all_pairs_of(one.name, options))), flush=True)
    report["sets"] = {one.name: _report(one) for one in judged}
    if options.all_pairs:
        report["all_pairs"] = _all_pairs(options, model, world, device)
    if options.against and model:
        report["against"] = _against(options, model, judged, world, device)
    if folder:
        (folder / "evaluation.json").write_text(as_json(report))
        if judged:
            roc.plot({one.name: one.roc for one in judged}, folder / "roc.png")
        for one in judged:
            if options.show and one.pixels is not None:
                pictures.write(folder / f"worst_pairs_{one.name}.png", _worst_pairs(one, options.show))
        print(f"written: {folder}")


def _judged(
    options: EvaluateOptions, model: "EmbeddingModel", world: World, device: "torch.device"
) -> Iterator[Judged]:
    for path in options.sets:
        make = _judge_bin if path.suffix in (".bin", ".parquet") else _judge_list
        yield make(path, model, options, world)
    if options.ijb is not None:
        yield _judge_ijb(options.ijb, model, options, world, device)


def _judge_bin(path: Path, model: "EmbeddingModel", options: EvaluateOptions, world: World) -> Judged:
    from partial_fc.evaluate.verification import Verification

    one = Verification(path, model.image_size, options.batch_size, flip=model.flip)
    values = dict(one.run(model.forward, world))
    assert one.roc is not None

    def pixels(pair: int) -> tuple[pictures.Pixels, pictures.Pixels]:
        first, second = one.pair_N2[pair]
        return decode(one.file_M[first]), decode(one.file_M[second])

    kept = {key.partition("/")[2]: value for key, value in values.items() if "tar@" not in key}
    return Judged(one.name, one.distance_N, one.same_N, one.roc, kept | _tar(one.roc), one.row_MD, one.pair_N2, pixels)


def _judge_list(path: Path, model: "EmbeddingModel", options: EvaluateOptions, world: World) -> Judged:
    from partial_fc.evaluate.verification import accuracy_values, distances, fold_accuracy

    name, pairs = path.stem, _read_together(path, options.root, world)
    row_ND = embed_together(model, pairs.images, world, options.batch_size, name)
    pair_N2 = np.stack((pairs.first_N, pairs.second_N), axis=1)
    distance_N = distances(row_ND, row_ND, pair_N2)
    accuracy = fold_accuracy(distance_N, pairs.same_N, pairs.folds)
    curve = Roc.from_distances(distance_N, pairs.same_N, accuracy.mean)
    values = {key.partition("/")[2]: value for key, value in accuracy_values(name, accuracy)}

    def pixels(pair: int) -> tuple[pictures.Pixels, pictures.Pixels]:
        first, second = pair_N2[pair].tolist()
        return decode(pairs.images.read_file(first)), decode(pairs.images.read_file(second))

    def caption(pair: int) -> list[str]:
        return [pairs.images.where(image) for image in pair_N2[pair].tolist()]

    values |= _tar(curve)
    return Judged(name, distance_N, pairs.same_N, curve, values, row_ND, pair_N2, pixels, caption, pairs.folds)


def _read_together(path: Path, root: Path | None, world: World) -> PairList:
    """Reads a list on all ranks. Raises ValueError on all if one cannot read it, or reads something else."""
    from partial_fc.checkpoint.consistency import compare_replicas
    from partial_fc.evaluate.verification import check_pairs

    def read() -> PairList:
        pairs = read_pair_list(path, root)
        check_pairs(path, pairs.same_N, pairs.folds)
        return pairs

    pairs = all_or_raise(read, world, f"evaluate/{path.stem}/opened")
    if difference := compare_replicas({"pairs": pairs.digest()}, world, f"evaluate/{path.stem}/same"):
        raise ValueError(f"{path} names other pairs on some ranks: {difference}")
    return pairs


def _judge_ijb(
    folder: Path, model: "EmbeddingModel", options: EvaluateOptions, world: World, device: "torch.device"
) -> Judged:
    from partial_fc.verbs.model import ijb as janus

    ijb = janus.Ijb(folder, options.target, model.image_size)
    # Images weigh by the length of their features and the score of the detector, as in InsightFace's table.
    feat_ND = embed_together(model, ijb.images, world, options.batch_size, options.target, unit=False)
    feat_ND *= ijb.score_N[:, None]
    template_TD = janus.pool(feat_ND, ijb.template_N, ijb.media_N)
    distance_M = janus.verify(template_TD, ijb, world)
    curve = Roc.from_distances(distance_M, ijb.same_M, None)
    values = _tar(curve)
    if ijb.galleries:
        values |= dict(janus.values_1_n(template_TD, ijb, world, device))
    elif world.rank == 0:
        print(f"{folder / 'meta'} has no lists for 1:N (..._1N_gallery_*.csv, ..._1N_probe_mixed.csv): 1:1 only")
    return Judged(options.target, distance_M, ijb.same_M, curve, values, template_TD, np.empty((0, 2), np.int64))


def _all_pairs(
    options: EvaluateOptions, model: "EmbeddingModel | None", world: World, device: "torch.device"
) -> dict[str, Any]:
    """Prints the results of --all-pairs, and returns their part of the report."""
    from partial_fc.evaluate.all_pairs import FALSE_ACCEPT_RATES as RATES
    from partial_fc.evaluate.all_pairs import all_pairs

    source = open_on_all(
        lambda: open_sets(options.all_pairs, shared_classes=options.shared_classes, vectors=True), world
    )
    row_ND, label_N = embed_labelled(model, source, world, options.batch_size, "all pairs")
    found, num_classes = all_pairs(row_ND, label_N, world, device, name="all pairs"), len(np.unique(label_N))
    if world.rank == 0:
        num_pairs = found.num_genuine + found.num_impostors
        print(
            f"all pairs of {counted(len(label_N), 'image')} of {counted(num_classes, 'class')}: {num_pairs:,}, "
            f"{found.num_genuine:,} of them the same"
        )
        rows = [
            f"{_row(f'for FAR {far}', at)}{round(at.far * found.num_impostors):>11,}"
            for far, at in found.at_far.items()
        ]
        few = _too_few([far for far in RATES if far not in found.at_far], found.num_impostors, "give more images")
        print("\n".join((f"{_HEAD}{'such pairs':>11}", *rows, *few)), flush=True)
    return {
        "paths": [str(path) for path in options.all_pairs],
        "images": len(label_N),
        "classes": num_classes,
        "pairs": found.num_genuine + found.num_impostors,
        "same": found.num_genuine,
        "values": {f"tar@far={far}": found.at_far[far].tar if far in found.at_far else float("nan") for far in RATES},
        "threshold_at_far": {far: asdict(threshold) for far, threshold in found.at_far.items()},
    }


def _against(
    options: EvaluateOptions, new: "EmbeddingModel", judged: list[Judged], world: World, device: "torch.device"
) -> dict[str, Any]:
    """Prints a table of each set, of both models and of the new one's embeddings searched among the old one's, and
    returns their part of the report. Raises ValueError for an older model with wider embeddings, or other inputs."""
    from partial_fc.evaluate.all_pairs import all_pairs
    from partial_fc.evaluate.verification import distances

    assert options.against is not None
    old = replace(options, model=options.against, image_size=None, flip=None).load(device)
    if type(old) is not type(new) or old.embedding_size > new.embedding_size:
        raise ValueError(
            f"--against {options.against}: {old}; {new}: expected the same kind of input, and embeddings that are at "
            "most as wide"
        )
    found: dict[str, list[dict[str, float]]] = {}
    for one, other in zip(judged, _judged(replace(options, ijb=None), old, world, device), strict=False):
        distance_N = distances(_narrowed(one.row_MD, old.embedding_size), other.row_MD, one.pair_N2)
        found[one.name] = [*map(_tar, (one.roc, Roc.from_distances(distance_N, one.same_N, None), other.roc))]
    if options.all_pairs:
        source = open_on_all(lambda: open_sets(options.all_pairs, shared_classes=options.shared_classes), world)
        (new_ND, label_N), (old_ND, _) = (
            embed_labelled(one, source, world, options.batch_size, "all pairs") for one in (new, old)
        )
        for query_ND, gallery_ND in ((new_ND, None), (_narrowed(new_ND, old.embedding_size), old_ND), (old_ND, None)):
            at_far = all_pairs(query_ND, label_N, world, device, name="pairs", gallery_ND=gallery_ND).at_far
            found.setdefault("all pairs", []).append({f"tar@far={far}": one.tar for far, one in at_far.items()})
    if world.rank == 0:
        print(f"query and gallery by this model (new) and by {old.source} (old): TAR at FAR")
        for name, rates in found.items():
            keys = [key for key, value in rates[0].items() if not np.isnan(value)]
            print(f"  {name:18}" + "".join(f"{key.removeprefix('tar@far='):>9}" for key in keys))
            for side, of_side in zip(_SIDES, rates, strict=True):
                print(f"    {side:16}" + "".join(f"{of_side[key]:>9.2%}" for key in keys), flush=True)
    return {
        "model": str(old.source),
        "sets": {name: dict(zip(_SIDES, rates, strict=True)) for name, rates in found.items()},
    }


def _narrowed(row_MD: NDArray[Any], width: int) -> NDArray[Any]:
    """Returns the first numbers of each row, scaled to length 1."""
    part_MD = row_MD[:, :width]
    return part_MD / np.linalg.norm(part_MD, axis=1, keepdims=True)


def _tar(curve: Roc) -> dict[str, float]:
    return {f"tar@far={far}": curve.tar_at(float(far)) for far in FALSE_ACCEPT_RATES}


def _thresholds(curve: Roc) -> dict[str, roc.Threshold]:
    """Returns the threshold at each FAR for which the set is large enough."""
    found = {far: curve.threshold_at(float(far)) for far in FALSE_ACCEPT_RATES}
    return {far: threshold for far, threshold in found.items() if threshold}


def _report(one: Judged) -> dict[str, Any]:
    return {
        "pairs": len(one.same_N),
        "same": one.roc.num_genuine,
        "values": one.values,
        "threshold": asdict(one.roc.best()),
        "threshold_at_far": {far: asdict(threshold) for far, threshold in _thresholds(one.roc).items()},
    }


def _all_pairs_of(name: str, options: EvaluateOptions) -> str:
    """Returns the command that measures smaller FARs than a set of pairs allows."""
    beside = [folder for path in options.sets if path.stem == name for folder in (path.with_suffix(""), Path(name))]
    images = next((str(folder) for folder in beside if folder.is_dir()), "FOLDER_OF_CLASS_FOLDERS")
    command = shlex.join(["partial-fc", "evaluate", str(options.model), "--all-pairs", images])
    return f"more pairs, of all images with all others: `{command}`"


def _lines(one: Judged, remedy: str) -> list[str]:
    values = one.values
    lines = [f"{one.name}: {len(one.same_N):,} pairs, {one.roc.num_genuine:,} of them the same"]
    if "accuracy" in values:
        lines.append(
            f"  accuracy {values['accuracy']:.2%} +- {values['accuracy_std']:.2%} over {one.folds} folds; 95 % "
            f"interval {values['accuracy_low']:.2%} to {values['accuracy_high']:.2%}"
        )
    thresholds = _thresholds(one.roc)
    lines.append(_HEAD)
    if "accuracy" in values:  # nearly all of IJB's pairs are impostors: FAR must choose there
        lines.append(_row("to use", one.roc.best()))
    lines += [_row(f"for FAR {far}", threshold) for far, threshold in thresholds.items()]
    lines += _too_few([far for far in FALSE_ACCEPT_RATES if far not in thresholds], one.roc.num_impostors, remedy)
    galleries = {key.partition("/")[0]: None for key in values if "/rank1" in key}
    lines += [f"  1:N, gallery {name}: {_ranks_text(values, name)}" for name in galleries]
    return lines


def _too_few(rates: list[str], num_impostors: int, remedy: str) -> list[str]:
    words = f"and below cannot be measured with {num_impostors:,} pairs of different classes;\n    {remedy}"
    return [f"  FAR {far} {words}" for far in rates[:1]]


def _ranks_text(values: dict[str, float], name: str) -> str:
    from partial_fc.verbs.model import ijb as janus

    keys = [*(f"rank{rank}" for rank in janus.RANKS), "tpir@fpir=1e-1", "tpir@fpir=1e-2"]
    shares = {key: values[f"{name}/{key}"] for key in keys}
    return ", ".join(f"{key} {'not measured' if np.isnan(x) else f'{x:.2%}'}" for key, x in shares.items())


def _row(what: str, t: roc.Threshold) -> str:
    """Formats a row of the table of thresholds, whose head is _HEAD."""
    return f"  {what:12}{t.cosine:>10.4f}{t.distance:>13.4f}{t.accuracy:>8.2%}{t.tar:>14.2%}{t.far:>10.4%}"


def _worst_pairs(one: Judged, show: int) -> pictures.Pixels:
    """Draws the most similar impostors and the least similar genuine pairs; a red bar marks the threshold's errors."""
    assert one.pixels is not None
    best, rows = one.roc.best(), []
    for kind, which, sign in (("different, yet similar", ~one.same_N, 1), ("the same, yet dissimilar", one.same_N, -1)):
        pairs = np.flatnonzero(which)
        pairs = pairs[np.argsort(sign * one.distance_N[pairs], kind="stable")][:show]
        wrong = (one.distance_N <= best.distance) != one.same_N
        tiles = []
        for pair in pairs.tolist():
            lines = [f"pair {pair}  cosine {1 - one.distance_N[pair] / 2:.3f}", *one.caption(pair)]
            images = np.concatenate([pictures.fit(image) for image in one.pixels(pair)], axis=1)
            tiles.append(pictures.Tile(images, lines, pictures.RED if wrong[pair] else None))
        title = f"{kind}: {int((wrong & which).sum()):,} of {int(which.sum()):,} wrong at cosine {best.cosine:.4f}"
        rows.append(pictures.Row(title, tiles))
    return pictures.sheet(rows, _ACROSS)
