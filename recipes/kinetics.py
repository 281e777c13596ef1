"""Video classification on Kinetics' lists, on GluonCV's command line: SlowFast networks, cross-entropy.

    python train.py kinetics --dataset kinetics400 --data-dir TRAIN --val-data-dir VAL --train-list train.txt \\
        --val-list val.txt --model slowfast_4x16_resnet50_kinetics400 --slowfast --video-loader --num-classes 400 \\
        --new-length 64 --new-height 256 --new-width 340 --scale-ratios 1.0,0.8 --batch-size 8 --num-gpus 8
    horovodrun -np 32 -H ip1:8,ip2:8,ip3:8,ip4:8 python train.py kinetics ... --lr 0.4     the tutorial's four machines
    python train.py kinetics ... --eval --resume-params best.params --num-segments 10 --three-crop     30 views

`--batch-size` counts the clips of one process (GPU), `--num-data-workers` the threads of a machine. Their other names
are taken, too: --num-epochs (--epochs), --wd, --log-interval (--frequent), --save-dir (--models-root), --lr-mode
(--lr-scheduler), --lr-decay (--lr-factor), --num-gpus (--gpus), --dtype (--precision). What a GluonCV user tries first,
and results on clips that can be made here: docs/video.md.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partial_fc import flags
from partial_fc.data.video import ClipList, ClipTransform, Window
from partial_fc.data.video.transforms import Augmentation
from partial_fc.flags import ExchangeFlags, Flags, GuardFlags, LaunchFlags, OptimFlags, RunFlags, ScheduleFlags
from partial_fc.flags.numbers import CLASSES, THREADS

from .compat import gluoncv

# The parts are imported when the flags are known to be right: torch takes seconds, which --help does without.
if TYPE_CHECKING:
    from partial_fc.train.backbone import TorchBackbone
    from partial_fc.train.run import Run

# Flags that may change between the parts of one run: they do not change what is learned.
_MAY_CHANGE = ("num_workers", "prefetch_ratio", "max_bad_records", "check_data", "data_dir", "val_data_dir", "val_list",
               "logging_file", "save_frequency", "resume_params", "resume_epoch", "train_only", "eval", "num_segments",
               "three_crop", "view_scores", "channels_last_3d", "lr_steps")  # fmt: skip
# What --help shows.
_MATTER = (
    "train_list", "val_list", "data_dir", "val_data_dir", "num_classes", "video_loader", "new_length", "new_height",
    "new_width", "input_size", "data_aug", "model", "resume_params", "eval", "num_segments", "three_crop",
    "batch_size", "weight_decay", "precision", "lr", "lr_decay_epoch", "epochs", "models_root", "gpus",
)  # fmt: skip
Dataset = Literal["ucf101", "kinetics400", "somethingsomethingv2", "hmdb51", "custom"]


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What is trained on. Defaults are train_recognizer's. A clip of 36 frames of 224 pixels takes 5.4 MB in memory;
    each process holds (threads + --prefetch-ratio x threads) x --batch-size of them."""

    train_list: Path | None = None
    """A video a line: `path num_frames label`."""
    val_list: Path | None = None
    """The same, of those to validate on after each epoch."""
    data_dir: Path = Path()
    """What the paths of --train-list are relative to."""
    val_data_dir: Path | None = None
    """What those of --val-list are relative to. none: --data-dir."""
    dataset: Dataset = "ucf101"
    """Its name stands in the names of files."""
    num_classes: int = 101
    video_loader: bool = False
    """The paths are video files (".mp4" is added where there is no dot), of any length; else folders of img_00001.jpg,
    img_00002.jpg, ..., as many as the list says."""
    new_length: int = 64
    """Frames of the window that a clip is taken from. (GluonCV's default, 1, fits no SlowFast network.)"""
    slow_temporal_stride: int = 16
    """Of the window the slow network sees every so manieth frame."""
    fast_temporal_stride: int = 2
    """The fast network likewise."""
    new_height: int = 256
    """v1: every frame is made --new-width x --new-height, whatever its proportions. v2: its shorter side is made
    --new-height. v3: its shorter side is drawn from --new-height to --new-width. (GluonCV's default, 0: as it is.)"""
    new_width: int = 340
    input_size: int = 224
    """Pixels of a side of what the network sees."""
    data_aug: Augmentation = "v1"
    """v1, v2: a crop of one of --scale-ratios at one of 13 places; v3: at random; v4: a random rectangle of 8 % to all
    of the area. One draw a clip."""
    scale_ratios: tuple[float, ...] = (1.0, 0.875, 0.75, 0.66)
    """Sides of v1's and v2's crops, of the shorter side."""
    max_distort: int = 1
    """By how many places in --scale-ratios height and width of a crop may differ."""
    mirror: bool = True
    """Mirror half of the clips; not where left and right make another class."""
    all_places: bool = True
    """13 places of a crop, not 5. (GluonCV: --more-fix-crop, which means 5.)"""
    num_workers: int = 4
    """Decoding threads of each process; --num-data-workers are those of a machine."""
    prefetch_ratio: float = 2.0
    """Batches that wait, for each thread."""
    max_bad_records: int = 100
    """Videos that cannot be read and are replaced by others (each is named in the log) before training stops."""
    check_data: Literal["quick", "full", "off"] = "quick"
    """Whether the listed files are there, on every host: some hundred of them, or all."""

    def __post_init__(self) -> None:
        flags.check_numbers(
            self,
            num_classes=CLASSES,
            new_length="[1, 65536]",
            slow_temporal_stride=1,
            fast_temporal_stride=1,
            new_height="[1, 16384]",
            new_width="[1, 16384]",
            input_size="[32, 16384]",
            scale_ratios="(0, 1]",
            num_workers=THREADS,
            prefetch_ratio="[0, 1024]",
        )
        self.transform(random=True)

    def transform(self, random: bool) -> ClipTransform:
        """Raises ValueError for sizes that do not fit together."""
        return ClipTransform(
            window=Window(self.new_length, self.fast_temporal_stride, self.slow_temporal_stride),
            input_size=self.input_size,
            new_width=self.new_width,
            new_height=self.new_height,
            kind=self.data_aug,
            random=random,
            scale_ratios=self.scale_ratios,
            max_distort=self.max_distort,
            mirror=self.mirror,
            all_places=self.all_places,
        )


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The network, its files, how it is tested."""

    model: Literal[
        "slowfast_4x16_resnet50_kinetics400", "slowfast_8x8_resnet50_kinetics400",
        "slowfast_4x16_resnet101_kinetics400", "slowfast_8x8_resnet101_kinetics400",
    ]  # fmt: skip
    """4x16: 4 slow frames, --slow-temporal-stride 16; 8x8: 8, with stride 8."""
    width: int = 64
    """Channels of the slow network's first layer, a multiple of 8; 64 are the published networks."""
    dropout: float = 0.5
    partial_bn: bool = False
    """All batch norms but the first ones normalise with their running statistics, which stay as they are."""
    freeze_bn: bool = False
    """Scales and shifts of batch norms are not trained."""
    no_wd: bool = False
    """No decay of biases, nor of scales and shifts of batch norms; else all is decayed, as Gluon does."""
    clip_grad: float = 0.0
    """Each number of the gradient is brought to within this; 0: any. (--clip is of the whole gradient's norm.)"""
    lr_decay_epoch: str = "40,60"
    """For --lr-mode step: the epochs at which the rate falls."""
    lr_decay_period: int = 0
    """For --lr-mode step, instead: it falls each time after so many epochs."""
    resume_params: Path | None = None
    """Start from a .params file, GluonCV's or ours: weights and running statistics."""
    resume_epoch: int = 0
    """Start at this epoch of data and learning rate."""
    save_frequency: int = 10
    """Epochs between two .params files; besides the best and the last. 0: only these."""
    logging_file: str = "train.log"
    """The log, below --save-dir."""
    train_only: bool = False
    """No validation."""
    channels_last_3d: bool = True
    """Clips and convolution weights lie in memory with the channels last."""
    eval: bool = False
    """Train nothing: measure --resume-params (or else the newest checkpoint) on --val-list, each video in
    --num-segments clips."""
    num_segments: int = 1
    """For --eval: windows of a video; 10 in the papers' 30 views."""
    three_crop: bool = False
    """For --eval: three crops along the longer side instead of the middle; --input-size is then the shorter side."""
    view_scores: Literal["outputs", "probabilities"] = "outputs"
    """For --eval: what is added up over the clips of a video. GluonCV adds outputs."""

    def __post_init__(self) -> None:
        flags.check_numbers(self, width="[8, 65536]", dropout="[0, 1)", num_segments=1)
        self.decay_epochs(0)
        if Path(self.logging_file).name != self.logging_file:
            raise ValueError(f"--logging-file is {self.logging_file!r}; expected a name: it is put inside --save-dir")
        if not self.eval and (self.num_segments > 1 or self.three_crop):
            raise ValueError("--num-segments and --three-crop are for --eval: a clip is trained on by itself")

    def decay_epochs(self, epochs: float) -> list[int]:
        if self.lr_decay_period:
            return list(range(self.lr_decay_period, int(epochs), self.lr_decay_period))
        words = self.lr_decay_epoch.split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise ValueError(f"--lr-decay-epoch is {self.lr_decay_epoch!r}; expected epochs, as in 40,60")
        return [int(word) for word in words]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a SlowFast network. Defaults are those of GluonCV's train_recognizer. Its flags are all taken; see
    recipes/compat/gluoncv.py for those of other names here."""

    data: Flags[DataFlags] = DataFlags()
    model: Flags[ModelFlags]
    optim: Flags[OptimFlags] = OptimFlags(batch_size=25, weight_decay=1e-4, precision="fp32")
    schedule: Flags[ScheduleFlags] = ScheduleFlags(
        lr=0.1, lr_scaling="none", base_batch_size=64, lr_scheduler="step", epochs=3.0
    )
    run: Flags[RunFlags] = RunFlags(
        models_root=Path("params"), frequent=50, verbose=0, checkpoint_every=0, keep_checkpoints=2
    )
    guards: Flags[GuardFlags] = GuardFlags()
    exchange: Flags[ExchangeFlags] = ExchangeFlags()
    launch: Flags[LaunchFlags] = LaunchFlags()

    def __post_init__(self) -> None:
        from partial_fc.models import slowfast

        window, shape = self.data.transform(random=False).window, slowfast.SHAPES[self.model.model]
        if (window.num_fast, window.num_slow) != (shape.fast_frames, shape.slow_frames):
            raise ValueError(
                f"--new-length {window.length} with --fast-temporal-stride {window.fast_stride} and "
                f"--slow-temporal-stride {window.slow_stride} gives {window.num_fast} and {window.num_slow} frames; "
                f"{self.model.model} takes {shape.fast_frames} and {shape.slow_frames}: --new-length 64 "
                f"--fast-temporal-stride 2 --slow-temporal-stride {64 // shape.slow_frames}"
            )
        if not self.model.eval and self.data.train_list is None:
            raise ValueError("--train-list is missing: a video a line, `path num_frames label`")
        if self.data.val_list is None and not self.model.train_only:
            raise ValueError("--val-list is missing; without one, --train-only")
        if self.model.clip_grad and self.optim.optimizer != "sgd":
            raise ValueError("--clip-grad goes with --optimizer sgd; take --clip")


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    config, notes = parse(arguments)
    status = config.launch.start()
    if status is not None:
        return status
    from partial_fc.train.run import run_in_worlds

    return run_in_worlds("kinetics", config, notes, train_here, bare=True)


def train_here(run: Run) -> int:
    """Puts the parts together, trains, writes what came out."""
    from partial_fc import checkpoint
    from partial_fc.data.order import Epochs, Keyed
    from partial_fc.train.loop import train

    from .kinetics_epochs import ClipLine, CountedCrossEntropy, EpochEnd, measure
    from .kinetics_start import load_params, resume_epoch, with_decay_steps

    config, data, world = run.config, run.config.data, run.world
    _log_to_file(run)
    for note in _notes(config):
        run.note(note)

    with ExitStack() as parts:
        # ---- data
        train_source = None if config.model.eval else _open(run, data.train_list, data.data_dir)
        val_dir = data.val_data_dir or data.data_dir
        val_source = None if config.model.train_only else _open(run, data.val_list, val_dir)
        counts = len(train_source or ()), len(val_source or ())
        run.logger.info(f"Load {counts[0]} training samples and {counts[1]} validation samples.")

        # ---- model
        backbone = _backbone(run)
        head = CountedCrossEntropy(data.num_classes, world, backbone.precision.parameter_dtype)

        # ---- start: a given checkpoint, else the newest of this run, else a .params file, else anew
        saver = parts.enter_context(run.saver(checkpoint.Saver))
        start = run.resume(backbone, head, train_source or val_source, may_change=_MAY_CHANGE)
        if config.model.resume_params and (start.step == 0 or config.model.eval):
            load_params(run, backbone)
        if train_source is None:
            assert val_source is not None
            if not (config.model.resume_params or start.step):
                raise ValueError(
                    f"--eval: no weights; give --resume-params, or the --save-dir of a run, not {run.root}"
                )
            return measure(run, backbone, val_source)
        order = Epochs(Keyed(len(train_source), config.run.seed), len(train_source))
        resume_epoch(run, order, start)
        loader = parts.enter_context(
            run.loader(
                train_source,
                data.transform(random=True),
                start,
                order,
                num_workers=data.num_workers,
                prefetch=int(data.prefetch_ratio * data.num_workers),
                max_bad_records=data.max_bad_records,
            )
        )
        run.config = with_decay_steps(run, order)
        schedule = run.schedule(start, order)
        if run.is_finished(start, schedule):
            return 0

        # ---- train
        run.logger.info(
            f"Total batch size is set to {run.global_batch} on {world.size} "
            f"{'GPUs' if run.device.type == 'cuda' else 'processes'}"
        )
        batch_size = config.optim.batch_size * world.size
        line = ClipLine(
            config.run.frequent, schedule.total_steps, order.num_samples, batch_size, run.global_batch, head
        )
        epochs = EpochEnd(run, backbone, head, val_source, order, start)
        job = run.job(loader, backbone, head, schedule, [epochs], saver, start, line, each_epoch=True)
        return run.finish(job, train(job), {})


def _log_to_file(run: Run) -> None:
    """GluonCV's log: one for each machine, lines with nothing before them."""
    if run.world.local_rank == 0:
        handler = logging.FileHandler(run.root / run.config.model.logging_file)
        handler.setFormatter(logging.Formatter("%(message)s"))
        run.logger.addHandler(handler)
    values = {name: str(value) if isinstance(value, Path) else value for name, value in flags.flat(run.config).items()}
    run.logger.info(argparse.Namespace(**values))


def _open(run: Run, path: Path, folder: Path) -> ClipList:
    """Equal on all ranks, with its videos there. A collective."""
    data = run.config.data

    def opened() -> ClipList:
        source = ClipList(path, folder, data.num_classes, videos=data.video_loader)
        if data.check_data != "off" and run.world.local_rank == 0:
            source.check_present(len(source) if data.check_data == "full" else 512)
        return source

    return run.open_data(opened)


def _backbone(run: Run) -> TorchBackbone:
    """Equal on all ranks. A collective."""
    import torch

    from partial_fc import counter_rng
    from partial_fc.models import slowfast
    from partial_fc.models.inputs import CLIPS

    config, model = run.config, run.config.model
    torch.manual_seed(counter_rng.derive_key(config.run.seed, *b"backbone"))
    module = slowfast.build(model.model, config.data.num_classes, model.width, model.dropout)
    if model.partial_bn:
        module.freeze_batch_norms("partial")
    if model.freeze_bn:
        module.freeze_batch_norms("scales")
    if model.channels_last_3d:
        module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    contract = {"network": model.model, "width": str(model.width), "output": "float32 (N, num_classes), logits"}
    more: dict[str, Any] = {"decay_biases": not model.no_wd, "decay_norms": not model.no_wd}
    if config.optim.optimizer == "sgd":
        more |= {"nesterov": True, "lr_in_momentum": True, "clip_value": model.clip_grad}
    return run.backbone(module, CLIPS, contract, **more)


def _notes(config: Config) -> Iterator[str]:
    """What was asked for and makes no difference here."""
    if config.data.data_aug == "v4" and flags.is_given(config.data, "scale_ratios"):
        yield "--scale-ratios go with --data-aug v1 and v2"
    if config.model.train_only and config.data.val_list:
        yield "--val-list without effect: --train-only"
    decays = config.model.lr_decay_period or flags.is_given(config.model, "lr_decay_epoch")
    if decays and config.schedule.lr_scheduler != "step":
        yield f"--lr-decay-epoch, --lr-decay-period: the rate's course is --lr-mode {config.schedule.lr_scheduler}"


@flags.told_as_usage
def parse(arguments: list[str]) -> tuple[Config, list[str]]:
    """The command line -> configuration, and notes on flags of GluonCV's that mean nothing here. Raises ValueError for
    values that make no sense, alone or together."""
    ours, notes = gluoncv.translate(arguments)
    config = flags.parse(Config, ours, "train.py kinetics", matter=_MATTER, typed=arguments, renamed=gluoncv.RENAMED)
    return config, notes
