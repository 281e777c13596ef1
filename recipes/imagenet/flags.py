"""Flags of recipe imagenet alone: databases and networks. Names and defaults are resnet50_trainer's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc.flags import check_numbers
from partial_fc.flags.facts import ANY, CLASSES, PIXELS, Basic, In, Makes, MayChange, Refused, Workers


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """The training data. Defaults are resnet50_trainer's."""

    train_data: Annotated[str, Basic]
    """An LMDB or a LevelDB with Datum or TensorProtos records; null: one image, whatever the label, which shows how
    fast this machine is."""
    test_data: Annotated[Path | None, Basic, MayChange] = None
    """A database to test on after each epoch."""
    db_type: Annotated[Literal["lmdb", "leveldb"] | None, Basic] = None
    """The expected kind of database; by default any."""
    num_labels: Annotated[int, In(CLASSES), Basic, Refused("these are other classes")] = 1000
    """Classes."""
    num_channels: Literal[3] = 3
    """Grey images are expanded."""
    image_size: Annotated[int, In(PIXELS), Basic] = 227
    """Pixels of a side of the crop that the network takes."""
    resize: Annotated[int, In(PIXELS)] = 256
    """Pixels of the shorter side before the crop."""
    mirror: bool = True
    """Mirror half of the training images."""
    image_mean_per_channel: Annotated[tuple[float, float, float] | None, In(ANY)] = None
    """Mean of blue, green, red, which is subtracted. none: 128, or that of --conventions."""
    image_std_per_channel: Annotated[tuple[float, float, float] | None, In("(0, inf)")] = None
    """Standard deviation, by which the difference is divided. none: likewise."""
    epoch_size: Annotated[int, In(1), Basic] = 1_500_000
    """Images of an epoch over all machines, independent of the database; rounded down to a multiple of an update."""
    test_epoch_size: Annotated[int | None, In(1)] = None
    """Number of test images, the first ones. none: all."""
    order: Literal["key", "shuffled"] = "key"
    """key: of S machines the k-th reads records k, k + S, ... in the order of their keys; shuffle when the database is
    built. shuffled: all machines read all of it in an order that is random in every epoch."""
    num_workers: Workers = "auto"
    """Decoding threads of each process. auto: its cores but one, from 1 to 16."""
    max_bad_records: Annotated[int, MayChange] = 100
    """Damaged records to log and replace by others before training stops."""
    check_data: Annotated[Literal["quick", "off"], MayChange] = "quick"
    """Check of the data before the first step, shared by all ranks; a run on unusable data stops."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.resize < self.image_size:
            raise ValueError(
                f"--resize {self.resize} is smaller than the crop, --image_size {self.image_size}; give a larger one"
            )


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The network."""

    network: Annotated[
        Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"],
        tyro.conf.arg(aliases=["--backbone"]),
        Basic,
    ] = "resnet50"
    resnext_num_groups: Annotated[int, In("[1, 65536]"), Makes("groups")] = 1
    """Groups of the middle convolution; more than one make it a ResNeXt."""
    resnext_width_per_group: Annotated[int, In("[1, 65536]"), Makes("width_per_group")] = 64
    """Channels of a group in the first stage."""
    conventions: Literal["caffe2", "torchvision"] = "caffe2"
    """Conventions of the network and its pixels. caffe2: pooling without a border, batch norm with eps 0.001 that
    forgets nine tenths each step, BGR, (pixel - 128) / 128; torchvision: a border, eps 0.00001, one tenth, RGB with
    ImageNet's mean and deviation."""
    head: Annotated[Literal["cross-entropy", "partial-fc"], Basic, Refused("this is another last layer")] = (
        "cross-entropy"
    )
    """partial-fc: the last layer's classes are sharded over the processes, without a bias, and compared by
    cosine; for very many classes. The flags from --loss on apply to it."""
    pretrained: Annotated[Path | None, Basic, MayChange] = None
    """Start from these weights: torchvision's file of this network."""
    load_model_path: Annotated[Path | None, Basic, MayChange] = None
    """Start from these weights: model.safetensors, a run's folder, a checkpoint, or a file of torch.save."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.pretrained and self.load_model_path:
            raise ValueError("--pretrained and --load_model_path exclude each other; give one of them")
