"""Face recognition, and every other task with very many classes: a backbone, Partial FC, verification.

    horovodrun -np 8 -H localhost:8 bash config.sh          what config.sh says, on the GPUs of this machine
    python train.py face --dataset emore --rec DIR          one process, ArcFace/InsightFace records
    python train.py face --dataset 100w --max-steps 200     a million classes, no data: how fast is this machine?

`make demo` (2 processes on 2 CPU cores, 4,000 characters as classes) takes 2 minutes with AMX, 3.1 with AVX2
instructions alone, and ends at 99.8 % on characters that were never seen in training; README.md has the table of
results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from partial_fc import files, flags
from partial_fc.errors import UsageError
from partial_fc.flags import Flags, check_numbers
from partial_fc.flags.facts import CLASSES, LABELS, PIXELS, Basic, In, MayChange, Refused, Shows, Workers, facts
from partial_fc.flags.from_file import with_file
from partial_fc.flags.known import split
from partial_fc.memory import may_have_gpu
from partial_fc.recipe import start
from partial_fc.train.begin.start import named

from . import arcface_torch, presets
from . import heads as face_heads
from . import vectors as face_vectors
from .backbone import NETWORKS, OF_TRANSFORMERS, ModelFlags, rates_of
from .insightface import ELSEWHERE
from .tuning import TuningFlags

# Parts that need torch are imported after the flags are checked: torch takes seconds, which --help avoids.
if TYPE_CHECKING:
    from partial_fc.data import Source
    from partial_fc.data.order import Order
    from partial_fc.train.run import Run

HIST = "training.log", "Training: %(asctime)s-%(message)s"  # as arcface_torch's (log_style.py)
DATASETS = Literal[("custom", *presets.PRESETS)]  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """The training data."""

    rec: Annotated[tuple[Path, ...] | Path | None, Basic] = None
    """A folder with train.rec, a .rec, a folder of class folders, a list, tar shards or vectors (docs/data.md). Several
    paths are several sets, whose classes follow one another; a pattern in quotes, 'shards/*.rec', names the shards of
    one set; FILE.sets has a set a line, `name path [weight]`."""
    dataset: Annotated[DATASETS, Basic] = "custom"
    """A preset: class count, schedule and verification sets of a known data set; `custom` fixes none of them."""
    config: Annotated[Path | None, Basic, MayChange] = None
    """arcface_torch's configs/NAME.py, or NAME.toml with flags of this command line; read as data, never executed. The
    .toml may have a table for each of several heads (docs/many-labels.md)."""
    heads: tuple[str, ...] = ()
    """What the head of one of several sets has otherwise than the others, if --rec names the sets, NAME=path: words
    NAME.flag=value. `--sample-rate words=0.1`, with any flag of the head, and `--batch-size image=96 words=32` mean
    the same. See docs/many-labels.md."""
    shared_classes: bool = False
    """Classes of several sets are one class if they have the same name or, in sets without names, the same number."""
    labels: Annotated[int, In(LABELS)] = 1
    """The most labels of an image: the numbers in the header of a record, `path 3,5,8` in a list, a list in a .json or
    a .parquet (docs/many-labels.md). 1: the first counts, if there are more."""
    labels_drawn: Annotated[int, In(0)] = 0
    """Of an image's --labels, how many are drawn for each step, others each time; 0: all."""
    num_classes: Annotated[int | None, In(CLASSES), Refused("these are other classes")] = None
    """Classes of the last layer; none: what the data says."""
    num_images: Annotated[int | None, In(1)] = None
    """Images of one epoch of synthetic data."""
    image_size: Annotated[int, In(PIXELS), Basic] = 112
    """Height and width in pixels; of other images the shorter side is resized, and the middle used. By default the size
    in the file `property` beside a .rec."""
    mirror: bool = True
    """Mirror half of the training images, and add both embeddings in verification."""
    augment: Annotated[Literal["none", "glyph", "face", "photo"], Basic] = "none"
    """none: the images as they are (docs/data.md has what was measured).
    face: some images are cropped, of low resolution, in other light, blurred, grey, JPEG or partly erased (AdaFace's
    and CVLface's). photo: a random part of each image, in other light, some also blurred, grey or partly erased.
    glyph: small shifts, turns, blur, noise and contrast, for the characters of the demo. See docs/data.md."""
    balance: Literal["none", "sqrt", "class"] = "none"
    """How often classes are drawn. none: as often as they have images. class: all equally often. sqrt: by the square
    root of their images. Each class takes its images in turn; an epoch has as many images as the set."""
    sample_weights: Path | None = None
    """FILE.npy: a floating number for each record, in the order of the data (of several sets: one set after the other),
    which the loss of that record is multiplied by. The sum over a batch is divided by the number of its images, not by
    the sum of their weights, so weights with a mean of 1 keep the meaning of --lr. The log has the weighted loss."""
    apply: Annotated[Path | None, Refused("these are other classes")] = None
    """changes.tsv of `partial-fc data clean`: labels to change, images to leave out (docs/after-training.md)."""
    order: Literal["shuffled", "blocks"] = "shuffled"
    """shuffled: a random permutation. blocks: for a .rec on a spinning disk or a network drive: blocks of 1,024
    consecutive images in random order, shuffled 32 blocks at a time; the next 32 are read ahead, about 230 MB of 7 kB
    images."""
    num_workers: Workers = "auto"
    """Decoding threads of each process. auto: its cores but one, from 1 to 16."""
    max_bad_records: Annotated[int, MayChange] = 100
    """Damaged records to log and replace by others before training stops."""
    check_data: Annotated[Literal["quick", "off"], MayChange] = "quick"
    """Check of the data before the first step, shared by all ranks; a run on unusable data stops. quick: some hundred
    images and, if they are cheap to read, all labels. (`partial-fc doctor data` checks all.)"""
    val_targets: Annotated[tuple[str, ...] | None, Basic, MayChange] = None
    """Verification sets: NAME of NAME.bin in --rec, or a path. none: what the preset names, for `custom` every .bin
    there; `--val-targets` with nothing after it: no verification."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if isinstance(self.rec, tuple) and len(self.rec) < 2:
            object.__setattr__(self, "rec", self.rec[0] if self.rec else None)
        if self.dataset == "synthetic" and self.num_classes is None:
            raise ValueError("--dataset synthetic needs --num-classes")
        if self.order == "blocks" and self.rec is not None and not self.is_record_file:
            raise ValueError(f"--order blocks is for a .rec file; the images of {self.shown} are separate files")
        if self.order == "blocks" and self.balance != "none":
            raise ValueError(f"--balance {self.balance} draws classes, --order blocks reads the file on; leave one out")
        if self.apply and (self.labels > 1 or self.rec is None):
            raise ValueError(f"--apply {self.apply} changes the one label of each image of --rec")
        if not self.heads:  # of sets each is checked by itself
            face_heads.check_drawn(self.labels, self.labels_drawn)
        if self.labels > 1 and self.balance != "none":
            raise ValueError(
                f"--balance {self.balance} with --labels {self.labels}: it draws images by their class, and these are "
                "of several; leave one out"
            )
        if self.augment == "glyph" and self.mirror:
            raise ValueError("--augment glyph with --mirror: a mirrored character is another one; add --no-mirror")

    @property
    def recs(self) -> tuple[Path, ...]:
        """Returns the paths of --rec."""
        return self.rec if isinstance(self.rec, tuple) else (self.rec,) if self.rec else ()

    @property
    def shown(self) -> str:
        return " ".join(map(str, self.recs))

    @property
    def is_record_file(self) -> bool:
        recs = [path for _, path in map(files.named, self.recs)]
        return bool(recs) and all(rec.suffix == ".rec" or (rec / "train.rec").exists() for rec in recs)

    @property
    def are_sets(self) -> bool:
        """Returns whether --rec names several sets."""
        return len(self.recs) > 1 or any(rec.suffix == ".sets" for rec in self.recs)

    @property
    def synthetic(self) -> bool:
        return self.dataset in presets.SYNTHETIC


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a backbone with Partial FC.

    partial-fc train face --rec photos --epochs 10 --gpus 2

    Every value comes from the flag, else --config, else --dataset's preset,
    else the default; the values shown below are already those of the --dataset and --config given."""

    data: Flags[DataFlags] = DataFlags()
    model: Flags[ModelFlags] = ModelFlags()
    tuning: Flags[TuningFlags] = TuningFlags()
    head: Annotated[Flags[flags.HeadFlags], Shows(("loss", "sample_rate"))] = flags.HeadFlags()
    optim: Flags[flags.OptimFlags] = flags.OptimFlags()
    schedule: Flags[flags.ScheduleFlags] = flags.ScheduleFlags()
    run: Flags[flags.RunFlags] = flags.RunFlags(models_root=Path("runs/face-DATA-NETWORK"))
    guards: Flags[flags.GuardFlags] = flags.GuardFlags()
    exchange: Flags[flags.ExchangeFlags] = flags.ExchangeFlags()
    launch: Annotated[Flags[flags.LaunchFlags], Shows(("device",))] = flags.LaunchFlags()

    def __post_init__(self) -> None:
        from partial_fc.train import head_from_flags

        if not self.data.synthetic and self.data.rec is None:
            raise ValueError("--rec DIR is missing: give the folder of the images (--dataset 100w needs none)")
        if self.optim.batch_size == 1 and not self.optim.sync_bn:
            raise ValueError("--batch-size 1: batch norm needs 2 images a process, or --sync-bn")
        face_vectors.check(self.data, self.model, self.tuning)
        if (self.tuning.compatible_with or self.data.apply) and face_heads.of(self):
            raise ValueError("--compatible-with and --apply are for a run with one head; --rec names several sets")
        heads = [(one.flags, one.drawn) for one in face_heads.of(self)]
        for head, drawn in heads or [(self.head, self.data.labels_drawn or self.data.labels)]:
            head.check(self.launch, self.optim, self.schedule, self.run.resume, drawn)
            head_from_flags.check(head, self.optim, drawn)


def main(arguments: list[str]) -> int:
    """Runs the recipe; returns the exit status."""
    config, notes = parse(arguments)
    return start("face", train_here, config, notes, called=_called(config), hist=HIST)


def train_here(run: Run) -> int:
    """Builds the parts, trains, writes the results."""
    import torch

    from partial_fc import counter_rng
    from partial_fc.data.check.at_start import check_data
    from partial_fc.data.labels import NONE
    from partial_fc.data.npy import read_weights
    from partial_fc.data.sets.joined import tables_of
    from partial_fc.data.transform import as_stored, training_square
    from partial_fc.evaluate.verification import Verification
    from partial_fc.models import lora

    from . import backbone as face_backbone
    from . import tuning as face_tuning
    from .log_style import SpeedLine, SummedUp

    config, data, world = run.config, run.config.data, run.world
    of_vectors = config.model.takes_vectors
    heads = face_heads.of(config)
    labels = {one.name: one.labels for one in heads}
    several = max(labels.values(), default=data.labels) > 1
    drawn: Any = data.labels_drawn
    if heads:
        drawn = [one.drawn for one in heads] if any(one.drawn < one.labels for one in heads) else 0

    # ---- data
    source = run.open_data(lambda: (face_vectors.open_tables if of_vectors else _source)(data, labels or data.labels))
    num_classes = source.num_classes if data.apply else data.num_classes or source.num_classes
    order = _order(run, source)
    total_steps, _ = run.lengths(order)
    if not data.synthetic:
        for finding in check_data(source, num_classes, data.check_data, world, max_bad_records=data.max_bad_records,
                               seed=config.run.seed, num_threads=data.num_workers, embedding=True):  # fmt: skip
            run.logger.info(finding)
    batch_size = config.optim.batch_size * 2
    verified = [] if of_vectors else _verification_sets(data)
    sets = [Verification(path, data.image_size, batch_size, flip=data.mirror, name=name) for name, path in verified]
    if not (sets or of_vectors or data.synthetic) and data.val_targets is None:
        rec = files.named(data.recs[0])[1]
        beside = rec if rec.is_dir() else rec.parent
        run.note(f"nothing is evaluated; pairs: `partial-fc data pairs FOLDER {beside / 'unseen.bin'}`")
    for one in sets if data.check_data != "off" else ():
        one.check(world)
    transform = as_stored if of_vectors else training_square(data.image_size, data.augment, data.mirror)
    weights = read_weights(data.sample_weights, len(source)) if data.sample_weights else None
    loader = run.loader(source, transform, order, num_workers=data.num_workers, max_bad_records=data.max_bad_records,
                        labels_drawn=drawn, weights=weights)  # fmt: skip

    # ---- model
    torch.manual_seed(counter_rng.derive_key(config.run.seed, *b"backbone"))
    input_size = tables_of(source)[0].width if of_vectors else data.image_size
    network = face_backbone.build(config.model, input_size, data.mirror)
    if rank := config.tuning.lora:
        network.notes.append(f"--lora {rank}: {lora.adapt(network.module, rank, input_size)}")
    compile_for = (data.image_size, data.image_size, 3) if config.model.compile else None
    backbone = run.backbone(network.module, network.to_input, network.contract, compile_for=compile_for,
                            **config.model.optimizer_options())  # fmt: skip
    if config.tuning.ema:
        backbone.keep_average(config.tuning.ema)
    teacher = face_tuning.teacher(config.tuning, network, input_size, backbone)
    ignored = NONE if several else None  # to look for it takes a wait for the device
    settings: dict[str, Any] = {"freeze_steps": config.model.freeze_steps}
    if heads:
        head: Any = face_heads.build(run, heads, source, network.embedding_size, backbone, ignored)
        settings["head_lr_ratio"] = 1.0  # each head has its own
    else:
        head = run.partial_fc(config.head, num_classes, network.embedding_size, backbone, ignored)
    if config.tuning.compatible_with:
        head, settings["start_from"] = face_tuning.with_older(run, head, network, backbone, source)
    if network.code:
        run.keep_code(network.code)
    rates = face_backbone.rate_notes(network.module, config.optim, config.schedule, run.global_batch)
    tuned = face_tuning.notes(config.tuning, total_steps)
    for note in (*network.notes, *_notes(config, source), *rates, *tuned):
        run.note(note)

    # ---- a given checkpoint, else this run's newest, else --pretrained and --start-centres, else from scratch
    tests = face_vectors.evaluations(data, source, head, labels) if of_vectors else [SummedUp(sets)]
    return run.train(backbone, head, loader, tests, line=SpeedLine, teacher=teacher, **settings)


def _called(config: Config) -> tuple[str | Path, str]:
    """Returns data set and network, for the folder's name."""
    from partial_fc.data.sets.joined import is_pattern, set_name

    data, model = config.data, config.model
    preset = data.dataset if data.dataset != "custom" else None
    network = model.network.rpartition("/")[2]
    plain = len(data.recs) == 1 and not is_pattern(data.recs[0])
    return preset or data.config or (
        data.recs[0] if plain else "+".join(files.named(rec)[0] or set_name(rec) for rec in data.recs)
    ), network


def _source(data: DataFlags, labels: int | Mapping[str, int]) -> Source:
    from partial_fc.data import Synthetic
    from partial_fc.data.sets.changed import open_changed
    from partial_fc.data.sets.joined import open_sets

    if data.synthetic:
        assert data.num_classes is not None
        return Synthetic(data.num_classes, data.image_size, data.num_images, data.labels)
    if data.apply:
        return open_changed(data.recs, data.shared_classes, data.apply)
    return open_sets(data.recs, data.num_classes, data.shared_classes, num_labels=labels)


def _order(run: Run, source: Source) -> Order:
    from partial_fc.data import RecordSource
    from partial_fc.data.order import Balanced, Blocks, Keyed
    from partial_fc.data.sets.joined import Joined
    from partial_fc.data.sets.weighted import Shares, Weighted

    seed, balance = run.config.run.seed, run.config.data.balance
    shares = [one.share for one in face_heads.of(run.config)]
    if any(shares):
        assert isinstance(source, Joined)
        return Shares(source.sets, shares, seed)
    weighted = isinstance(source, Joined) and any(weight != 1 for _, _, weight in source.sets)
    if balance != "none":
        if weighted:
            raise ValueError(f"--balance {balance}: the sets have weights; leave one out")
        if (label_N := source.labels()) is None:
            raise ValueError(f"--balance {balance}: the labels are inside the images' files; leave it out")
        return Balanced(label_N, seed, {"class": 0.0, "sqrt": 0.5}[balance])
    if run.config.data.order == "blocks" and isinstance(source, RecordSource | Joined) and not weighted:
        return Blocks(len(source), seed, source.read_ahead)
    return Weighted(source.sets, seed) if isinstance(source, Joined) and weighted else Keyed(len(source), seed)


def _verification_sets(data: DataFlags) -> list[tuple[str, Path]]:
    """Returns (name, path) of each: NAME, or SET-NAME if several training sets have one of that name."""
    from partial_fc.data.sets.joined import find_sets
    from partial_fc.data.sets.ranges import as_url

    if data.synthetic:
        return []
    folders: dict[Path, str] = {}
    for one in find_sets(data.recs):
        for path in one.paths:
            if not as_url(path):
                folders.setdefault(path if path.is_dir() else path.parent, one.name)
    found: list[tuple[str, Path]] = []
    if data.val_targets is None:
        found = [(name, path) for folder, name in folders.items() for path in sorted(folder.glob("*.bin"))]
    for target in data.val_targets or ():
        file = Path(target if target.endswith(".bin") else f"{target}.bin")
        there = [(name, folder / file) for folder, name in folders.items() if (folder / file).exists()]
        beside = next(iter(folders), Path())
        found += [("", file)] if target.endswith(".bin") else there or [("", beside / file)]
    missing = [str(path) for _, path in found if not path.exists()]
    if missing:
        raise ValueError(
            f"verification set(s) not found: {', '.join(missing)}; name those that are there with --val-targets, or "
            "none with `--val-targets` alone"
        )
    stems = [path.stem for _, path in found]
    return [(path.stem if stems.count(path.stem) == 1 else f"{name}-{path.stem}", path) for name, path in found]


def _notes(config: Config, source: Source) -> list[str]:
    from partial_fc.data import RecordSource
    from partial_fc.data.sets.joined import Joined

    data, notes = config.data, []
    shards = source.shards if isinstance(source, Joined) else ()
    for name, one in {shard.name: shard.source for shard in shards}.items() or [(data.rec, source)]:
        stated = one.image_size if isinstance(one, RecordSource) else None
        if stated not in (None, (0, 0), (data.image_size, data.image_size)):
            notes.append(f"{name}: its {stated[0]} x {stated[1]} images are resized to --image-size {data.image_size}")
    if isinstance(source, Joined):
        notes += source.notes(data.shared_classes)
    if data.sample_weights and config.tuning.teacher:
        notes.append("--sample-weights with --teacher: what the teacher adds to the loss is not weighted")
    if config.head.start_centres == "imprint" and not config.model.pretrained:
        notes.append("--start-centres imprint without --pretrained: the means are those of a random network")
    if data.config and data.num_images and not data.synthetic and data.num_images != len(source):
        counts = f"num_image is {data.num_images:,}, the data's {len(source):,} count"
        notes.append(f"{counts} (docs/coming-from-insightface.md)")
    if data.synthetic and flags.is_given(data, "check_data"):
        notes.append(f"--check-data {data.check_data}: synthetic data has nothing to check")
    return notes


def _for_this_machine(config: Config) -> tuple[Config, list[str]]:
    """Returns the configuration, for which nobody has named a network, with that of the checkpoint to resume from, else
    `tiny` where no device but a CPU is there; and notes."""
    asked, device, notes, network = config.run.resume, config.launch.device, list[str](), ""
    folder = named(config, _called(config)).run.checkpoints if asked in flags.NO_CHECKPOINT else Path(asked)
    manifests = [*folder.glob("step-*/manifest.json"), *folder.glob("manifest.json")]
    with suppress(OSError, ValueError, LookupError):  # a damaged checkpoint, or none
        network = json.loads(files.read_text(sorted(manifests)[-1]))["contract"]["network"] if asked != "never" else ""
    if network not in NETWORKS:
        network = "r50" if device == "cuda" or (device == "auto" and may_have_gpu()) else "tiny"
        notes += ["--network tiny, as there is no GPU: --network r50 is larger"] * (network == "tiny")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, network=network)), notes


@flags.told_as_usage
def parse(arguments: list[str]) -> tuple[Config, list[str]]:
    """Returns (configuration, notes for the user). A value is the flag's, else --config's, else that which the network
    starts with, else the preset's, else the default; of the class count and the image size the data's own go before a
    preset's."""
    arguments = face_heads.gathered(with_file(arguments, facts(Config), face_heads.OWN))
    names = ("dataset", "config", *presets.OF_THE_DATA, "num_images", *OF_TRANSFORMERS, "network")
    typed, _ = split(arguments, names, {"network": {"short": "--backbone"}})
    preset = presets.get(typed.get("dataset", "custom"))
    stated, notes = arcface_torch.load(Path(typed["config"])) if "config" in typed else ({}, [])
    rates: dict[str, Any] = {}
    if not stated:  # a file states a whole run
        rates = rates_of(typed.get("network") or preset.get("network", ""), typed, typed.get("optimizer"))
    try:
        defaults = flags.with_defaults(Config, preset | rates | stated)
        config = flags.parse(Config, arguments, f"{flags.trainer()} face", default=defaults, elsewhere=ELSEWHERE)
    except UsageError as error:
        if str(error).startswith(f"--network is {stated.get('network')};"):
            raise UsageError(f"{typed['config']}: {error}") from error
        raise
    if rates:
        words = " ".join(f"{flags.flag(name)} {value}" for name, value in rates.items())
        notes.append(f"a transformer: {words}")
    if "network" not in {*typed, *preset} and not stated and not config.model.pretrained:
        config, default = _for_this_machine(config)
        notes += default
    data, replaced = presets.give_way(config.data, {*typed, *stated})
    notes += replaced
    if "num_classes" in typed and data.apply:
        raise UsageError(f"--num-classes with --apply {data.apply}: the data and the changes say how many there are")
    if "num_images" in typed and not data.synthetic:
        notes.append("--num-images is about synthetic data; this run has images")
    return dataclasses.replace(config, data=data), notes
