"""Flags of recipe kinetics alone: its data and its networks. Names and defaults are train_recognizer's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from partial_fc import flags
from partial_fc.flags.facts import CLASSES, THREADS, Basic, In, Makes, MayChange, Refused

from .video import ClipTransform, Window
from .video.transforms import Augmentation

Dataset = Literal["ucf101", "kinetics400", "somethingsomethingv2", "hmdb51", "custom"]


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """The training data. Defaults are train_recognizer's. A clip of 36 frames of 224 pixels takes 5.4 MB in memory;
    each process holds (threads + --prefetch-ratio x threads) x --batch-size of them."""

    train_list: Annotated[Path | None, Basic] = None
    """A video a line: `path num_frames label`."""
    val_list: Annotated[Path | None, Basic, MayChange] = None
    """The list of validation videos, for after each epoch."""
    data_dir: Annotated[Path, Basic, MayChange] = Path()
    """The folder that paths of --train-list are relative to."""
    val_data_dir: Annotated[Path | None, Basic, MayChange] = None
    """The folder that paths of --val-list are relative to. none: --data-dir."""
    dataset: Dataset = "ucf101"
    """The name of the data set, used in file names only: any network trains on any data set.
    (GluonCV's own for somethingsomethingv2, slowfast_16x8_resnet50_sthsthv2, is not here.)"""
    num_classes: Annotated[int, In(CLASSES), Basic, Refused("these are other classes")] = 101
    video_loader: Annotated[bool, Basic] = False
    """The paths are video files (".mp4" is added where there is no dot), of any length; else folders of img_00001.jpg,
    img_00002.jpg, ..., as many as the list says."""
    new_length: Annotated[int, In("[1, 65536]"), Basic] = 64
    """Frames of the window that a clip is taken from. (GluonCV's default, 1, fits no SlowFast network.)"""
    slow_temporal_stride: Annotated[int, In(1)] = 16
    """Frames of the window per frame of the slow network."""
    fast_temporal_stride: Annotated[int, In(1)] = 2
    """Frames of the window per frame of the fast network."""
    new_height: Annotated[int, In("[1, 16384]"), Basic] = 256
    """v1: every frame is made --new-width x --new-height, whatever its proportions. v2: its shorter side is made
    --new-height. v3: its shorter side is drawn from --new-height to --new-width. (GluonCV's default, 0: as it is.)"""
    new_width: Annotated[int, In("[1, 16384]"), Basic] = 340
    input_size: Annotated[int, In("[32, 16384]"), Basic] = 224
    """Pixels of a side of the network's input."""
    data_aug: Annotated[Augmentation, Basic] = "v1"
    """v1, v2: a crop of one of --scale-ratios at one of 13 places; v3: at random; v4: a random rectangle of 8 % to all
    of the area. One draw a clip."""
    scale_ratios: Annotated[tuple[float, ...], In("(0, 1]")] = (1.0, 0.875, 0.75, 0.66)
    """Sides of v1's and v2's crops, of the shorter side."""
    max_distort: int = 1
    """Largest difference between the positions of a crop's height and width in --scale-ratios."""
    mirror: bool = True
    """Mirror half of the clips; turn off if left and right distinguish classes."""
    all_places: bool = True
    """13 places of a crop, not 5. (GluonCV: --more-fix-crop, which means 5.)"""
    num_workers: Annotated[int, In(THREADS), MayChange] = 4
    """Decoding threads of each process; --num-data-workers are those of a machine."""
    prefetch_ratio: Annotated[float, In("[0, 1024]"), MayChange] = 2.0
    """Prefetched batches per thread."""
    max_bad_records: Annotated[int, MayChange] = 100
    """Unreadable videos to log and replace by others before training stops."""
    check_data: Annotated[Literal["quick", "off"], MayChange] = "quick"
    """Check on every host that listed files exist: some hundred of them."""

    def __post_init__(self) -> None:
        flags.check_numbers(self)
        self.transform(random=True)

    def transform(self, random: bool) -> ClipTransform:
        """Returns the transform. Raises ValueError for inconsistent sizes."""
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
    """The network, its files, its test."""

    model: Annotated[Literal[
        "slowfast_4x16_resnet50_kinetics400", "slowfast_8x8_resnet50_kinetics400",
        "slowfast_4x16_resnet101_kinetics400", "slowfast_8x8_resnet101_kinetics400", "slowfast_4x16_resnet50_custom",
    ], Basic, Makes("network")]  # fmt: skip
    """4x16: 4 slow frames, --slow-temporal-stride 16; 8x8: 8, with stride 8. All take any --num-classes."""
    width: Annotated[int, In("[8, 65536]")] = 64
    """Channels of the slow network's first layer, a multiple of 8; 64 are the published networks."""
    dropout: Annotated[float, In("[0, 1)")] = 0.5
    partial_bn: bool = False
    """All batch norms but the first ones use their running statistics and do not update them."""
    freeze_bn: bool = False
    """Do not train scales and shifts of batch norms."""
    no_wd: bool = False
    """No decay of biases, nor of scales and shifts of batch norms; else all is decayed, as Gluon does."""
    clip_grad: float = 0.0
    """Bound on each element of the gradient; 0: none. (--clip bounds the norm.)"""
    lr_decay_epoch: Annotated[str, Basic] = "40,60"
    """For --lr-mode step: the epochs at which the rate drops."""
    lr_decay_period: int = 0
    """For --lr-mode step, instead: the number of epochs between two drops."""
    resume_params: Annotated[Path | None, Basic, MayChange] = None
    """Start from a .params file, GluonCV's or ours: weights and running statistics."""
    resume_epoch: Annotated[int, MayChange] = 0
    """Start at this epoch of data and learning rate."""
    save_frequency: Annotated[int, MayChange] = 10
    """Epochs between two .params files, in addition to the best and the last. 0: only these."""
    logging_file: Annotated[str, MayChange] = "train.log"
    """The log, below --save-dir."""
    train_only: Annotated[bool, MayChange] = False
    """No validation."""
    channels_last_3d: Annotated[bool, MayChange] = True
    """Store clips and convolution weights channels-last."""
    eval: Annotated[bool, Basic, MayChange] = False
    """Train nothing: measure --resume-params (or else the newest checkpoint) on --val-list, each video in
    --num-segments clips."""
    num_segments: Annotated[int, In(1), Basic, MayChange] = 1
    """For --eval: windows of a video; 10 in the papers' 30 views."""
    three_crop: Annotated[bool, Basic, MayChange] = False
    """For --eval: three crops along the longer side instead of the middle; --input-size is then the shorter side."""

    def __post_init__(self) -> None:
        flags.check_numbers(self)
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
