"""The command line of recipe `face`: one field, one flag, one help text."""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from partial_fc.train.guards import OnNan
from recipes import arcface_torch_config, compression, face_checks, presets
from recipes.launch_flags import LaunchFlags

DATASETS = Literal[("custom", *presets.PRESETS)]  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains a backbone with Partial FC. Every value comes from the flag, else --config, else --dataset's preset,
    else the default; the values shown below are already those of the --dataset and --config given."""

    launch: tyro.conf.OmitArgPrefixes[LaunchFlags] = LaunchFlags()

    # ---- data
    dataset: DATASETS = "custom"
    """A preset: class count, schedule and verification sets of a known data set; `custom` fixes none of them."""
    config: Path | None = None
    """A configuration file in the style of arcface_torch (config.network = "r50"); read as data, never executed."""
    rec: Path | None = None
    """Where the images are: a folder with train.rec, a folder of class folders, or a list file (docs/data.md)."""
    num_classes: int | None = None
    """Classes of the last layer; none: what the data says."""
    num_images: int | None = None
    """Images of one epoch of synthetic data."""
    image_size: int = 112
    """Height and width in pixels; other images are resized."""
    mirror: bool = True
    """A mirrored image is of the same class: mirror half of the images, add both embeddings in verification."""
    augment: Literal["none", "glyph"] = "none"
    """glyph: small shifts, turns, blur, noise and contrast, for the characters of the demo."""
    num_workers: int = 2
    """Decoding threads of each process."""
    max_bad_records: int = 100
    """Damaged records that are replaced by others (each is named in the log) before training stops."""
    check_data: Literal["quick", "full", "off"] = "quick"
    """What is looked at before the first step, by all ranks together; data that is not fit to train on is refused.
    quick: some hundred images and, where they are cheap to read, all labels. full: every image."""

    # ---- model
    network: Annotated[
        Literal["r18", "r34", "r50", "r100", "r200", "mbf", "tiny"], tyro.conf.arg(aliases=["--backbone"])
    ] = "r50"
    """Residual network by depth, MobileFaceNet, or the demo's tiny one. (On the command line of horovodrun itself
    write --backbone: horovodrun takes --network for a misspelt flag of its own.)"""
    embedding_size: int = 512
    """Width of the embedding."""
    dropout: float = 0.0
    """Share of the values before the last linear layer that are dropped in training."""
    sync_bn: bool = False
    """Batch-norm statistics over all ranks: W ranks then do what one process does with the whole batch."""
    pretrained: Path | None = None
    """Start from the backbone in this file of arcface_torch (model.pt)."""
    head_centres: Path | None = None
    """Start from the class centres of this checkpoint, their optimiser anew. `partial-fc checkpoint import` makes one
    of InsightFace's centre files."""

    # ---- loss
    loss: Literal[
        "cosface",
        "arcface",
        "arcface-straight-through",
        "combined",
        "softmax",
        "sphereface",
        "adaface",
        "curricularface",
    ] = "cosface"
    """arcface-straight-through: the margin without its slope, as arcface_torch has it. combined: see --margins.
    sphereface, adaface, curricularface: with the margins that were published with them."""
    scale: float = 64.0
    """What cosines are multiplied by."""
    margins: tuple[float, float, float] | None = None
    """For `combined`: m1 m2 m3 of cos(m1 * angle + m2) - m3. (arcface is 1 0.5 0, cosface 1 0 0.4.)"""
    sub_centres: int = 1
    """Centres of each class; the nearest counts. More than one make room for classes with wrong images among theirs."""
    interclass_filtering_threshold: float = 0.0
    """A class that is not an image's own and has a larger cosine than this is left out of that image's softmax: it may
    be the same person under another number. 0: none is."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the classes that take part."""
    sample_rate: float = 1.0
    """Share of all class centres that are negatives in a step, 0 < rate <= 1. Worth it from millions of classes on."""
    sampling_correction: bool = False
    """Divides the sampled negatives' part of the softmax by the sample rate: the loss then estimates that over all
    classes."""
    hard_negatives: int = 0
    """Besides the sampled negatives, of each process: so many of its centres, the nearest known ones, for each class
    of the batch."""
    hard_negatives_every: int = 10
    """Steps from one search for nearer centres, among those that take part, to the next. One takes about a third of
    the arithmetic of the head's step."""
    head_impl: Literal["auto", "plain", "cpu", "triton"] = "auto"
    """What computes the last layer. auto: the Triton kernels on a GPU, the C++ kernel on a CPU, plain PyTorch for
    --precision fp64."""

    # ---- centres
    centre_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """How the class centres are stored; bf16 is rounded stochastically, so that small updates add up."""
    centre_state_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """How the optimiser's state of the centres is stored, where it is as wide as they are."""
    centre_place: Literal["device", "host", "disk"] = "device"
    """Where the centres and their state lie: in the memory of the device that computes, in the host's, or in files."""
    centre_path: Path | None = None
    """For --centre-place disk: a folder on a fast local disk, with a sub-folder for each process."""
    head_optimizer: Literal["same", "sgd", "nesterov", "adamw", "adagrad", "adam"] = "same"
    """Of the centres; it moves those that took part in a step. same: as --optimizer. adagrad and adam are row-wise:
    one number for a centre instead of one for each of its values (adam: for the second moment)."""
    head_lr: float | None = None
    """Learning rate of the centres; scaled and scheduled like --lr, which it is when not given."""
    head_weight_decay: float | None = None
    """Of the centres; --weight-decay when not given."""
    head_clip: float = 0.0
    """Largest norm of the gradient of all centres; --clip is then the backbone's alone. 0: see --clip."""
    head_catch_up: Literal["none", "exact"] = "none"
    """exact: before a centre takes part again it gets what a dense optimiser would have done to it meanwhile (decay,
    momentum). none: it rests."""

    # ---- optimisation
    batch_size: int = 64
    """Images of one process in one forward pass; see --accumulate."""
    lr: float = 0.1
    """Learning rate of backbone and centres (see --head-lr), for a global batch of --base-batch-size."""
    base_batch_size: int = 512
    """The global batch that --lr is meant for."""
    lr_scaling: Literal["linear", "none"] = "linear"
    """linear: --lr times global batch / --base-batch-size; the arithmetic is printed."""
    lr_scheduler: Literal["step", "polynomial", "cosine", "constant"] = "polynomial"
    """Course of the rate after the warm-up."""
    lr_steps: tuple[int, ...] = ()
    """For `step`: the updates after which the rate falls to a tenth."""
    lr_power: float = 1.0
    """For `polynomial`."""
    warmup_steps: int = 0
    """Updates in which the rate rises from 0."""
    warmup_epochs: float = 0.0
    """The same in epochs; added to --warmup-steps."""
    epochs: float = 20.0
    """Passes over the data; may be a fraction."""
    max_steps: int | None = None
    """Ends training after so many updates instead of --epochs."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Of backbone and centres (see --head-optimizer)."""
    momentum: float = 0.9
    """Of SGD, for backbone and centres."""
    weight_decay: float = 5e-4
    """Of backbone and centres (see --head-weight-decay)."""
    clip: float = 0.0
    """Largest norm of the whole gradient, over backbone and all shards; 0: any."""
    accumulate: int = 1
    """Micro-batches of --batch-size images that make one update: what one batch of all of them would do (batch norm
    apart), in the memory of one. Steps, schedules and --max-steps count updates."""
    precision: Literal["auto", "bf16", "fp16", "fp16-o2", "fp32", "fp64"] = "auto"
    """bf16, fp16: the backbone computes in 16 bits where that is safe (autocast); fp16 with a loss scale. fp16-o2: its
    weights are float16, too, with fp32 masters (Apex's O2). auto: bf16 where the hardware has it, else fp32. The head
    multiplies bfloat16 numbers where the backbone computes in 16 bits and the hardware has them, and adds up in fp32.
    fp64: for checks, where rounding would hide whether two runs do the same."""
    gradient_compression: Literal["none", "fp16", "bf16", "2bit", "powersgd"] = "none"
    """What the backbone's gradient travels as, for slow links. fp16, bf16: half the bytes. 2bit (as MXNet has it),
    powersgd: far fewer; what a step leaves out goes with the next ones."""
    compression_threshold: float | None = None
    """Of 2bit: what a value is sent as, in units of the gradient summed over the images; 0.5 when not given."""
    compression_rank: int | None = None
    """Of powersgd: rank of the matrices that are sent; 4 when not given."""
    activation_checkpointing: bool = False
    """Blocks of the backbone are computed again in backward instead of keeping their inner values: less memory, about a
    third more arithmetic, the same results."""
    channels_last: bool = True
    """Images and convolution weights lie in memory with the channels last: what tensor cores and CPUs like best."""
    seed: int = 0
    """Of everything that is random: equal seeds give equal runs, for any number of ranks."""
    deterministic: bool = False
    """Only GPU algorithms that repeat bit by bit, and no messages that Horovod joins by chance (slower)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: one GPU for each process where there is one."""

    # ---- run
    val_targets: tuple[str, ...] | None = None
    """Verification sets: NAME of NAME.bin in --rec, or a path. none: what the preset names, for `custom` every .bin
    there; `--val-targets` with nothing after it: no verification."""
    frequent: int = 20
    """Steps between two lines of the log."""
    telemetry_every: int = 500
    """Steps between two looks at the head's rows, for TensorBoard: rows never touched, their ages, cosines and
    lengths, classes that look like one identity; 0: never."""
    verbose: int = 2000
    """Steps between two verifications; 0: only at the end."""
    checkpoint_dir: Path | None = None
    """Where checkpoints are written: a folder that all hosts see, or one of its own on each. none: checkpoints in
    --models-root."""
    checkpoint_every: int = 2000
    """Steps between two checkpoints, which are written while training goes on; 0: only at the end."""
    buddy_every: int | None = None
    """Steps between two copies of each process's share of the state in the memory of another host, from which a run
    goes on that loses a host (horovodrun --min-np ... --host-discovery-script ...); 0: it goes on from its last
    checkpoint. none: 100 where horovodrun runs so and the centres are in memory, else 0."""
    keep_checkpoints: int = 3
    """Older ones are removed."""
    save_best: bool = True
    """A checkpoint also whenever a verification was the best so far (mean accuracy of all sets); the best one is kept
    besides --keep-checkpoints."""
    on_nan: OnNan = "stop"
    """Where the loss or a gradient is not finite; the first such tensor is named, and the batch written down below
    --models-root. stop: the run ends, the last checkpoint stands. skip: the update is made on no rank, and the run goes
    on; the centres then wait for the backbone's gradient in every step. rollback: back to the last checkpoint, and on
    with the data after the bad batch."""
    max_skips: int = 10
    """For skip: so many in a row, then it ends."""
    max_rollbacks: int = 3
    """For rollback: so many, then it ends."""
    desync_every: int = 500
    """Steps between two checks that the backbone and its optimiser are the same bits on all ranks; 0: never."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint of --checkpoint-dir, if any; never; or the DIR of a checkpoint."""
    models_root: Path = Path("runs/face")
    """Where everything is written: model, checkpoints, logs, TensorBoard, result.json, roc.png."""

    def __post_init__(self) -> None:
        synthetic = self.dataset != "custom" and presets.get(self.dataset).synthetic
        if not synthetic and self.rec is None:
            raise ValueError("--rec DIR is missing: where do the images lie? (--dataset 100w trains without any)")
        if synthetic and self.dataset == "synthetic" and self.num_classes is None:
            raise ValueError("--dataset synthetic needs --num-classes")
        for name in (
            "batch_size",
            "accumulate",
            "base_batch_size",
            "frequent",
            "keep_checkpoints",
            "max_skips",
            "max_rollbacks",
            "num_workers",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected at least 1")
        for name in (
            "verbose",
            "telemetry_every",
            "checkpoint_every",
            "desync_every",
            "clip",
            "head_clip",
            "warmup_steps",
            "warmup_epochs",
            "max_bad_records",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected 0 or more")
        if self.buddy_every is not None and self.buddy_every < 0:
            raise ValueError(f"--buddy-every is {self.buddy_every}; expected 0 or more")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"--max-steps is {self.max_steps}; expected at least 1")
        if self.loss == "combined" and self.margins is None:
            raise ValueError("--loss combined needs --margins m1 m2 m3")
        if self.loss != "combined" and self.margins is not None:
            raise ValueError(f"--margins go with --loss combined; --loss {self.loss} has its own: add --margins None")
        face_checks.check_head(self)
        compression.check(self)
        if self.augment == "glyph" and self.mirror:
            raise ValueError("--augment glyph with --mirror: a mirrored character is another one; add --no-mirror")
        if self.batch_size == 1 and not self.sync_bn:
            raise ValueError("--batch-size 1: batch norm needs 2 images a process, or --sync-bn")

    @property
    def checkpoints(self) -> Path:
        """The folder that they are in."""
        return self.checkpoint_dir or self.models_root / "checkpoints"

    @property
    def synthetic(self) -> bool:
        return self.dataset != "custom" and presets.get(self.dataset).synthetic


def parse(arguments: list[str]) -> tuple[Config, list[str]]:
    """The command line -> configuration, and notes for the user on what a --config file says in vain."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", default="custom")
    first.add_argument("--config", type=Path)
    known, _ = first.parse_known_args(arguments)
    defaults: dict[str, Any] = {}
    if known.dataset != "custom":
        defaults = _from_preset(known.dataset)
    notes: list[str] = []
    if known.config:
        from_file, notes = arcface_torch_config.load(known.config)
        defaults |= from_file
    # The defaults alone need not make sense (--rec is still missing), so nothing is checked yet.
    default = object.__new__(Config)
    for field in dataclasses.fields(Config):
        object.__setattr__(default, field.name, defaults.get(field.name, field.default))
    for name in ("rec", "models_root"):
        if isinstance(getattr(default, name), str):
            object.__setattr__(default, name, Path(getattr(default, name)))
    return tyro.cli(Config, args=arguments, default=default, prog="train.py face"), notes


def _from_preset(name: str) -> dict[str, Any]:
    preset = presets.get(name)
    values = {k: v for k, v in dataclasses.asdict(preset).items() if k not in ("synthetic", "more") and v is not None}
    return {"dataset": name, **values, **preset.more}
