"""Video classification on Kinetics' lists, on GluonCV's command line: SlowFast networks, cross-entropy.

    python train.py kinetics --dataset kinetics400 --data-dir TRAIN --val-data-dir VAL --train-list train.txt \\
        --val-list val.txt --model slowfast_4x16_resnet50_kinetics400 --slowfast --video-loader --num-classes 400 \\
        --new-length 64 --new-height 256 --new-width 340 --scale-ratios 1.0,0.8 --batch-size 8 --num-gpus 8
    horovodrun -np 32 -H ip1:8,ip2:8,ip3:8,ip4:8 python train.py kinetics ... --lr 0.4     the tutorial's four machines
    python train.py kinetics ... --eval --resume-params best.params --num-segments 10 --three-crop     30 views

`--batch-size` counts the clips of one process (GPU), `--num-data-workers` the threads of a machine. What a GluonCV
user tries first, and results on clips that can be made here: docs/recipes/kinetics.md.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from partial_fc import flags
from partial_fc.flags import ExchangeFlags, Flags, GuardFlags, LaunchFlags, OptimFlags, RunFlags, ScheduleFlags
from partial_fc.flags.facts import Shows
from partial_fc.recipe import start

from . import gluoncv_flags as gluoncv
from .flags import DataFlags, ModelFlags
from .video import ClipList

# Parts that need torch are imported after the flags are checked: torch takes seconds, which --help avoids.
if TYPE_CHECKING:
    from partial_fc.train.backbone import TorchBackbone
    from partial_fc.train.run import Run


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a SlowFast network. Defaults are those of GluonCV's train_recognizer. Its flags of other
    names are taken, too (recipes/kinetics/gluoncv_flags.py)."""

    data: Flags[DataFlags] = DataFlags()
    model: Flags[ModelFlags]
    optim: Annotated[Flags[OptimFlags], Shows(("weight_decay",))] = OptimFlags(
        batch_size=25, weight_decay=1e-4, precision="fp32"
    )
    schedule: Flags[ScheduleFlags] = ScheduleFlags(
        lr=0.1, lr_scaling="none", base_batch_size=64, lr_scheduler="step", epochs=3.0
    )
    run: Flags[RunFlags] = RunFlags(
        models_root=Path("params/DATA-NETWORK"), frequent=50, verbose=0, checkpoint_every=0, keep_checkpoints=2
    )
    guards: Flags[GuardFlags] = GuardFlags()
    exchange: Flags[ExchangeFlags] = ExchangeFlags()
    launch: Flags[LaunchFlags] = LaunchFlags()

    def __post_init__(self) -> None:
        from . import slowfast

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
        if self.optim.optimizer != "sgd" and self.model.clip_grad:
            raise ValueError("--clip-grad goes with --optimizer sgd; take --clip")
        if self.model.resume_epoch and self.model.resume_epoch >= self.schedule.epochs:
            raise ValueError(
                f"--resume-epoch {self.model.resume_epoch} of --num-epochs {self.schedule.epochs:g}, counted from 0: "
                "nothing would be trained"
            )


def main(arguments: list[str]) -> int:
    """Runs the recipe; returns the exit status."""
    config, notes = parse(arguments)
    return start("kinetics", train_here, config, notes, called=(config.data.dataset, config.model.model), bare=True)


def train_here(run: Run) -> int:
    """Builds the parts, trains, writes the results."""
    from partial_fc.data.order import Epochs, Keyed

    from . import epochs as gluon

    config, data, world = run.config, run.config.data, run.world
    _log_to_file(run)
    for note in _notes(config):
        run.note(note)

    # ---- data
    train_source = None if config.model.eval else _open(run, data.train_list, data.data_dir)
    val_source = None if config.model.train_only else _open(run, data.val_list, data.val_data_dir or data.data_dir)
    counts = len(train_source or ()), len(val_source or ())
    run.logger.info(f"Load {counts[0]} training samples and {counts[1]} validation samples.")
    order = Epochs(Keyed(counts[0], config.run.seed), counts[0])
    if train_source is not None:
        run.lengths(order)

    # ---- model
    backbone = _backbone(run)
    head = gluon.CountedCrossEntropy(data.num_classes, world, backbone.precision.parameter_dtype)
    if train_source is None:
        assert val_source is not None
        state = run.resume(backbone, head, val_source)
        if config.model.resume_params:
            gluon.load_params(run, backbone)
        elif not state.step:
            raise ValueError(f"--eval: no weights; give --resume-params, or the --save-dir of a run, not {run.root}")
        return gluon.measure(run, backbone, val_source)

    # ---- end of an epoch
    batch_size = config.optim.batch_size * world.size
    training = gluon.Training(head, batch_size, order)
    val = gluon.Validation(run.config, val_source, batch_size, order) if val_source is not None else None
    files = gluon.ParamsFiles(run, backbone.module, training, val, order)

    # ---- a given checkpoint, else this run's newest, else a .params file, else from scratch
    loader = run.loader(
        train_source,
        data.transform(random=True),
        order,
        num_workers=data.num_workers,
        prefetch=int(data.prefetch_ratio * data.num_workers),
        max_bad_records=data.max_bad_records,
    )
    run.logger.info(
        f"Total batch size is set to {run.global_batch} on {world.size} "
        f"{'GPUs' if run.device.type == 'cuda' else 'processes'}"
    )
    line = partial(gluon.ClipLine, batch_size=batch_size, update_size=run.global_batch, head=head)
    return run.train(backbone, head, loader, [training, val] if val else [training], hooks=files, line=line,
                     start_from=partial(gluon.start_from, run, backbone, order), rates=gluon.decay_steps(run, order),
                     each_epoch=True)  # fmt: skip


def _log_to_file(run: Run) -> None:
    """Writes GluonCV's log: one per machine, lines without a prefix."""
    from partial_fc.train.record.log import LogFile

    if run.world.local_rank == 0:
        handler = LogFile(run.root / run.config.model.logging_file)
        handler.setFormatter(logging.Formatter("%(message)s"))
        run.logger.addHandler(handler)
    values = {name: str(value) if isinstance(value, Path) else value for name, value in flags.flat(run.config).items()}
    run.logger.info(argparse.Namespace(**values))


def _open(run: Run, path: Path, folder: Path) -> ClipList:
    """Opens a list, equal on all ranks, and checks that its videos exist. A collective."""
    data = run.config.data

    def opened() -> ClipList:
        source = ClipList(path, folder, data.num_classes, videos=data.video_loader)
        if data.check_data != "off" and run.world.local_rank == 0:
            source.check_present(512)
        return source

    return run.open_data(opened)


def _backbone(run: Run) -> TorchBackbone:
    """Builds the backbone, equal on all ranks. A collective."""
    import torch

    from partial_fc import counter_rng
    from partial_fc.models.inputs import CLIPS

    from . import slowfast

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
    """Yields notes on flags without effect."""
    if config.data.data_aug == "v4" and flags.is_given(config.data, "scale_ratios"):
        yield "--scale-ratios go with --data-aug v1 and v2"
    if config.model.model.endswith("_custom") and not config.model.resume_params:
        yield f"--model {config.model.model}: it starts new, not from Kinetics weights"
    if config.model.train_only and config.data.val_list:
        yield "--val-list without effect: --train-only"
    decays = config.model.lr_decay_period or flags.is_given(config.model, "lr_decay_epoch")
    if decays and config.schedule.lr_scheduler != "step":
        yield f"--lr-decay-epoch, --lr-decay-period: the rate's course is --lr-mode {config.schedule.lr_scheduler}"


@flags.told_as_usage
def parse(arguments: list[str]) -> tuple[Config, list[str]]:
    """Parses the command line: configuration, and notes on GluonCV's flags without effect. Raises ValueError for
    invalid values or combinations."""
    ours, notes = gluoncv.translate(arguments)
    config = flags.parse(Config, ours, f"{flags.trainer()} kinetics", typed=arguments, renamed=gluoncv.RENAMED)
    return config, notes
