"""ImageNet classification from the image databases of Caffe and Caffe2, on their command line: a ResNet, cross-entropy.

    python train.py imagenet --train_data my_lmdb                                      one process, batches of 32
    horovodrun -np 16 -H ip1:8,ip2:8 python train.py imagenet --train_data my_lmdb --batch_size 256

`--batch_size` counts the images of one machine, over all its processes. Other commands, results, and what a Caffe2
user tries first: docs/recipes/imagenet.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from partial_fc import flags
from partial_fc.flags import Flags
from partial_fc.flags.facts import Shows
from partial_fc.recipe import start

from . import caffe2_flags as caffe2
from .flags import DataFlags, ModelFlags
from .rendezvous.start import RendezvousFlags, start_shard

# Parts that need torch are imported after the flags are checked: torch takes seconds, which --help avoids.
if TYPE_CHECKING:
    from partial_fc.data import Source
    from partial_fc.data.order import Order
    from partial_fc.models.inputs import Pixels
    from partial_fc.train.backbone import TorchBackbone
    from partial_fc.train.job import Head
    from partial_fc.train.run import Run

_SOFTMAX = flags.HeadFlags(loss="softmax", scale=16.0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a ResNet on an image database. Defaults are those of Caffe2's resnet50_trainer; --batch-size counts the
    images of this machine. Also taken: --base_learning_rate, --num_epochs, --num_gpus, --gpus 0,2, --dtype, --use_cpu,
    --model, --num_layers, --timeout, --first_iter_timeout, --distributed_interfaces."""

    data: Flags[DataFlags]
    model: Flags[ModelFlags] = ModelFlags()
    optim: Annotated[Flags[flags.OptimFlags], Shows(("weight_decay",))] = flags.OptimFlags(
        batch_size=32, weight_decay=1e-4, precision="fp32"
    )
    schedule: Annotated[Flags[flags.ScheduleFlags], Shows(("lr_step_epochs",))] = flags.ScheduleFlags(
        lr=0.1, lr_scaling="none", base_batch_size=256, lr_scheduler="step", lr_step_epochs=30.0, epochs=1000.0
    )
    run: Flags[flags.RunFlags] = flags.RunFlags(
        models_root=Path("runs/imagenet-DATA-NETWORK"),
        verbose=0,
        checkpoint_every=0,
        keep_checkpoints=2,
        save_best=False,
    )
    guards: Flags[flags.GuardFlags] = flags.GuardFlags()
    exchange: Flags[flags.ExchangeFlags] = flags.ExchangeFlags()
    launch: Flags[flags.LaunchFlags] = flags.LaunchFlags()
    rendezvous: Flags[RendezvousFlags] = RendezvousFlags()
    partial_fc: Flags[flags.HeadFlags] = _SOFTMAX

    def __post_init__(self) -> None:
        if self.optim.batch_size == 1 and not self.optim.sync_bn:
            raise ValueError("one image a process: batch norm needs 2, or --sync-bn")
        if self.model.head == "partial-fc":
            from partial_fc.train import head_from_flags

            self.partial_fc.check(self.launch, self.optim, self.schedule, self.run.resume)
            head_from_flags.check(self.partial_fc, self.optim)
        elif given := [flags.flag(name) for name, value in vars(self.partial_fc).items()
                       if value != getattr(_SOFTMAX, name)]:  # fmt: skip
            raise ValueError(
                f"{', '.join(given)} without --head partial-fc: the last layer has no class centres; add it, or leave "
                f"{'these' if len(given) > 1 else 'this'} out"
            )


def main(arguments: list[str]) -> int:
    """Runs the recipe; returns the exit status."""
    config, notes = parse(arguments)
    called = config.data.train_data, config.model.network
    return start("imagenet", train_here, config, notes, called=called, first=partial(start_shard, config.rendezvous))


def train_here(run: Run) -> int:
    """Builds the parts, trains, writes the results."""
    from partial_fc.data.check.at_start import check_data
    from partial_fc.data.transform import ShortSideCrop
    from partial_fc.head import CrossEntropy

    from .databases import DatabaseSource
    from .epochs import Caffe2Rows, LastUpdate, epoch_test

    config, data, world = run.config, run.config.data, run.world

    # ---- data
    source = _open(run, data.train_data)
    order = _order(run, source)
    run.lengths(order)
    if data.train_data != "null":
        for finding in check_data(source, data.num_labels, data.check_data, world, seed=config.run.seed,
                                  max_bad_records=data.max_bad_records, num_threads=data.num_workers):  # fmt: skip
            run.logger.info(finding)
    test_source = _open(run, str(data.test_data)) if data.test_data else None
    if data.train_data == "null" and flags.is_given(data, "check_data"):
        run.note(f"--check-data {data.check_data}: synthetic data has nothing to check")
    transform = ShortSideCrop(data.resize, data.image_size, random=True, mirror=data.mirror)
    loader = run.loader(source, transform, order, num_workers=data.num_workers, max_bad_records=data.max_bad_records)

    # ---- model
    backbone = _backbone(run)
    head: Head = CrossEntropy(data.num_labels, world, backbone.precision.parameter_dtype)
    if config.model.head == "partial-fc":
        width: Any = backbone.module.feature_width
        head = run.partial_fc(config.partial_fc, data.num_labels, width, backbone)

    # ---- end of an epoch
    test = epoch_test(config, test_source, head) if test_source else None
    last = LastUpdate(head, config.optim.batch_size, run.device)
    kind = source.kind.lower() if isinstance(source, DatabaseSource) else "lmdb"  # their default
    rows = Caffe2Rows(run, order, last, caffe2.namespace(flags.flat(config), world.local_size, kind))

    # ---- a given checkpoint, else this run's newest, else given weights, else from scratch
    return run.train(backbone, head, loader, [last, test] if test else [last], hooks=rows, each_epoch=True)


def _open(run: Run, path: str) -> Source:
    """Opens a source. A collective."""
    from partial_fc.data import Synthetic

    from .databases import open_database

    data = run.config.data
    if path == "null":
        return run.open_data(lambda: Synthetic(data.num_labels, data.resize, data.epoch_size))
    return run.open_data(lambda: open_database(path, data.db_type, data.num_labels))


def _order(run: Run, source: Source) -> Order:
    from partial_fc.data.order import Epochs, Keyed, Sharded

    data, size = run.config.data, run.config.data.epoch_size // run.global_batch * run.global_batch
    if not size:
        raise ValueError(
            f"--epoch_size {data.epoch_size} is less than one update, {run.global_batch} images over all machines; "
            "give a larger one, or a smaller --batch_size"
        )
    run.logger.info(f"Using epoch size: {size}")
    num_shards = run.world.size // run.world.local_size
    if data.order == "shuffled":
        return Epochs(Keyed(len(source), run.config.run.seed), size)
    return Epochs(Sharded(len(source), num_shards), size)


def _backbone(run: Run) -> TorchBackbone:
    """Builds the backbone, equal on all ranks. A collective."""
    import torch

    from partial_fc import counter_rng
    from partial_fc.embedding.load import stored_at
    from partial_fc.foreign.state_dicts import load_state

    from . import resnet

    config, data, model = run.config, run.config.data, run.config.model
    torch.manual_seed(counter_rng.derive_key(config.run.seed, *b"backbone"))
    module = resnet.build(
        model.network,
        data.num_labels if model.head == "cross-entropy" else 0,
        groups=model.resnext_num_groups,
        width_per_group=model.resnext_width_per_group,
        details=resnet.CAFFE2 if model.conventions == "caffe2" else resnet.TORCHVISION,
    )
    if given := model.pretrained or model.load_model_path:
        weights = stored_at(given).weights
        if model.head == "partial-fc":
            weights = {name: t for name, t in weights.items() if not name.startswith("fc.")}
        load_state(module, weights, given)
        if model.pretrained and model.conventions != "torchvision":
            run.note("--pretrained without --conventions torchvision: those weights expect RGB and its scale")
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    contract = {
        "network": model.network,
        "groups": str(model.resnext_num_groups),
        "width_per_group": str(model.resnext_width_per_group),
        "conventions": model.conventions,
        "image_size": str(data.image_size),
        "output": "float32 (N, num_classes), logits" if model.head == "cross-entropy" else "float32 (N, D), features",
    }
    sgd: dict[str, Any] = {"nesterov": True, "lr_in_momentum": True} if config.optim.optimizer == "sgd" else {}
    return run.backbone(module, _pixels(config), contract, decay_biases=False, **sgd)


def _pixels(config: Config) -> Pixels:
    from partial_fc.models.inputs import TORCHVISION, Pixels

    data, mean, std = config.data, config.data.image_mean_per_channel, config.data.image_std_per_channel
    if config.model.conventions == "torchvision" and mean is None and std is None:
        return TORCHVISION
    mean, std = mean or (128.0, 128.0, 128.0), std or (128.0, 128.0, 128.0)
    size = f"{data.image_size}, {data.image_size}"
    return Pixels(f"float32 (N, 3, {size}), BGR, (pixel - {mean}) / {std}", mean, std, bgr=True)


@flags.told_as_usage
def parse(arguments: list[str]) -> tuple[Config, list[str]]:
    """Parses the command line: configuration, and notes on Caffe2's flags. Raises ValueError for invalid
    values or combinations."""
    ours, notes = caffe2.translate(arguments)
    config = flags.parse(Config, ours, f"{flags.trainer()} imagenet", typed=arguments, renamed=caffe2.RENAMED)
    return config, notes
