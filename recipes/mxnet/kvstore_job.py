"""MXNet's train_mnist.py: digits over a key-value store (KVStore), with its flags and defaults; part of recipe `mnist`.

    partial-fc launch -n 2 -s 2 --launcher local python train.py mnist --engine mxnet --kv-store dist_sync

What one sees, what differs from MXNet's own, measured accuracies: docs/recipes/mxnet.md. MXNet is imported when the
flags are known to be right.
"""

import logging
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from partial_fc.data.idx import ImageSet, read_set
from partial_fc.flags import check_numbers, flag, is_given, told_as_usage
from partial_fc.flags import parse as read
from partial_fc.flags.facts import BATCH, THREADS, Basic, In
from partial_fc.flags.known import split
from partial_fc.verbs.train import exit_now


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains lenet or mlp on MNIST files with MXNet, on several devices and machines. Defaults are train_mnist.py's."""

    engine: Annotated[Literal["mxnet"], Basic] = "mxnet"
    """The engine of these flags; `train.py mnist --help` has those of PyTorch."""

    # ---- data
    data_dir: Annotated[Path, Basic] = Path("data")
    """Folder of MNIST's four files, compressed or not. Nothing is downloaded: `python -m demo digits --out DIR` writes
    a small set of real digits."""
    num_classes: Annotated[int, In("[2, 65536]")] = 10
    num_examples: Annotated[int | None, In(1)] = None
    """Images of an epoch, over all workers. none: all, MNIST's 60,000."""
    batch_size: Annotated[int, In(BATCH), Basic] = 64
    """Images of a batch of each worker, over all its devices."""
    seed: Annotated[int, In("[0, 2147483647]"), Basic] = 0
    """Seed of the initial weights and of the order of the images."""

    # ---- network
    network: Annotated[Literal["lenet", "mlp"], tyro.conf.arg(aliases=["--backbone"]), Basic] = "mlp"
    dtype: Literal["float32"] = "float32"
    """(MXNet 1.9.1 has no float16 on CPUs.)"""
    initializer: Literal["default", "xavier", "msra", "orthogonal", "normal", "uniform", "one", "zero"] = "default"
    """Initialisation of the weights. default: Xavier, normal, fan-in, magnitude 2."""

    # ---- devices and workers
    gpus: Annotated[str, Basic] = ""
    """GPUs of each worker, for example 0,2. none: the CPU."""
    cpus: Annotated[int, In(THREADS)] = 1
    """Devices on the CPU that share a batch like GPUs, to try out --work-load-list or --kv-store device."""
    work_load_list: str = ""
    """Relative shares of a batch on the devices, for example 3,1. none: equal shares."""
    kv_store: Annotated[Literal[
        "local", "device", "nccl", "dist_sync", "dist_device_sync", "dist_sync_device", "dist_async",
        "dist_device_async", "dist_async_device",
    ], Basic] = "device"  # fmt: skip
    """The store that sums gradients and updates weights. local, device, nccl: in one process, on the CPU, or its GPUs.
    dist_sync: on servers, which wait for all workers; dist_async: for none. ..._device: GPUs of a worker sum
    theirs first."""
    gc_type: Annotated[Literal["none", "2bit"], Basic] = "none"
    """Compression of the gradient: 2bit."""
    gc_threshold: Annotated[float, In("(0, inf)")] = 0.5
    """Each two-bit value is this, its negative, or 0; in sums over a worker's batch, not means."""
    start_timeout: Annotated[float, In("(0, inf)")] = 30.0
    """Seconds within which scheduler, servers and workers must connect (dist_*)."""

    # ---- optimizer
    optimizer: Annotated[Literal[
        "sgd", "nag", "adam", "adagrad", "adadelta", "adamax", "nadam", "rmsprop", "ftrl", "ftml", "signum", "dcasgd",
        "sgld", "lamb",
    ], Basic] = "sgd"  # fmt: skip
    lr: Annotated[float, Basic] = 0.05
    lr_factor: Annotated[float, In("(0, inf)"), Basic] = 0.1
    """Factor of the learning rate at each of --lr-step-epochs; 1: constant."""
    lr_step_epochs: Annotated[str, Basic] = "10"
    """Epochs after which the rate falls, for example 10,20. Or powP, for example pow2: to 0 as (1 - done) ** P."""
    mom: Annotated[float, Basic] = 0.9
    """Momentum, of sgd, nag, signum and dcasgd."""
    wd: Annotated[float, Basic] = 1e-4
    """Weight decay, of weights and gammas, not of biases."""
    num_epochs: Annotated[int, In(1), Basic] = 20

    # ---- what is printed and written
    disp_batches: Annotated[int, In(1), Basic] = 100
    """Batches between two lines of the log."""
    top_k: int = 0
    """Also print top-k accuracy."""
    loss: str = ""
    """Also print the loss: ce, nll_loss, or both with a comma."""
    model_prefix: Annotated[str | None, Basic] = None
    """Write PREFIX-symbol.json and PREFIX-0001.params, ... (worker r > 0: PREFIX-r-...)."""
    save_period: Annotated[int, In(1)] = 1
    """Epochs between two files of weights."""
    load_epoch: Annotated[int | None, In(1), Basic] = None
    """Continue from PREFIX-LOAD_EPOCH.params, which has weights but no momentum."""

    def __post_init__(self) -> None:
        check_numbers(self)
        self._check_devices()
        if self.gc_type != "none" and self.kv_store in ("local", "nccl"):
            raise ValueError(
                f"--gc-type {self.gc_type}: --kv-store {self.kv_store} has no compression; device and dist_* have"
            )
        if self.gc_type == "none" and is_given(self, "gc_threshold"):
            raise ValueError(f"--gc-threshold {self.gc_threshold} goes with --gc-type 2bit")
        if self.top_k >= self.num_classes:
            raise ValueError(f"--top-k {self.top_k} of {self.num_classes} classes is always right; give a smaller one")
        if unknown := [name for name in self.losses if name not in ("ce", "nll_loss")]:
            raise ValueError(f"--loss {unknown[0]}: expected ce, nll_loss, or ce,nll_loss")
        self._check_steps()
        if self.load_epoch is not None and self.model_prefix is None:
            raise ValueError(f"--load-epoch {self.load_epoch} needs --model-prefix: the name without -0001.params")
        if self.load_epoch is not None and self.load_epoch >= self.num_epochs:
            raise ValueError(
                f"--load-epoch {self.load_epoch} of --num-epochs {self.num_epochs}: nothing is left; give more epochs"
            )

    def _check_devices(self) -> None:
        if self.gpu_list and self.cpus > 1:
            raise ValueError(f"--gpus {self.gpus} and --cpus {self.cpus} both name devices; give one of them")
        if len(set(self.gpu_list)) < len(self.gpu_list):
            raise ValueError(f"--gpus {self.gpus} names a GPU twice")
        num_devices = len(self.gpu_list) or self.cpus
        if self.kv_store == "nccl" and not self.gpu_list:
            raise ValueError("--kv-store nccl adds up on GPUs; give --gpus, or --kv-store device")
        if len(self.loads(num_devices)) != num_devices:
            raise ValueError(
                f"--work-load-list {self.work_load_list} for {num_devices} device(s); expected one for each"
            )
        if not all(0 < load < math.inf for load in self.loads(num_devices)):
            raise ValueError(f"--work-load-list {self.work_load_list}: expected numbers above 0")
        if num_devices > self.batch_size:
            raise ValueError(f"--batch-size {self.batch_size} for {num_devices} devices; expected an image for each")

    def _check_steps(self) -> None:
        steps = self.lr_step_epochs
        if re.fullmatch(r"pow[- ]*\d+(\.\d+)?", steps):
            return
        if not re.fullmatch(r"\d+(,\d+)*", steps):
            raise ValueError(f"--lr-step-epochs {steps!r}: expected epochs, for example 10,20, or pow2")
        epochs = [int(epoch) for epoch in steps.split(",")]
        if epochs != sorted(set(epochs)) or epochs[0] < 1:
            raise ValueError(f"--lr-step-epochs {steps}: expected epochs from 1 on, each later than the one before")

    @property
    def gpu_list(self) -> list[int]:
        return _numbers("--gpus", self.gpus, int)

    @property
    def losses(self) -> list[str]:
        return self.loss.split(",") if self.loss else []

    def loads(self, num_devices: int) -> list[float]:
        return _numbers("--work-load-list", self.work_load_list, float) or [1.0] * num_devices


def start(arguments: list[str]) -> int:
    """Trains; returns the exit status. Ends the process after an unexpected error, with its trace: Python's own
    shutdown would end MXNet, whose threads may wait for the other workers."""
    config = parse(arguments)
    from . import kvstore
    from .library import mx

    try:
        with kvstore.joined(config.kv_store, config.start_timeout) as job:
            train(config, job)
    except (ValueError, FloatingPointError, OSError, KeyboardInterrupt):
        raise
    except mx.base.MXNetError as error:
        raise OSError(f"MXNet: {error}") from error
    except BaseException:
        traceback.print_exc()
        exit_now(1)
    return 0


def train(config: Config, job: Any) -> None:
    """Builds the parts and trains. job: a kvstore.Job."""
    from . import digits, module_fit
    from .library import mx

    with module_fit.log_lines(job.rank):
        logging.info("start with arguments %s", config)

        # ---- data
        images = {split: read_set(config.data_dir, split, config.num_classes) for split in ("train", "t10k")}
        _check_sizes(config, images, digits.SMALLEST_SIDE[config.network])
        num_images = len(images["train"].label_N)
        begin = config.load_epoch or 0
        order, num_batches = _order(config, job, num_images)
        train_batches = digits.DigitBatches(images["train"], order, begin)
        test = digits.TestImages(images["t10k"], config.batch_size)

        # ---- network
        symbol = digits.network(config.network, config.num_classes)
        how = module_fit.initializer(config.initializer)
        weights = module_fit.first_weights(symbol, train_batches, how, config.seed)
        if config.load_epoch is not None:
            weights = module_fit.load(str(config.model_prefix), config.load_epoch, job.rank, weights)

        # ---- devices, store, optimizer
        devices = module_fit.contexts(config.gpu_list, config.cpus)
        loads = config.loads(len(devices))
        if len(devices) > 1:
            parts = module_fit.shares(config.batch_size, loads)
            logging.info("a batch: %s", ", ".join(f"{n} on {device}" for n, device in zip(parts, devices, strict=True)))
        updates = num_batches * (job.num_workers if job.asynchronous else 1)  # per epoch, as the schedule counts them
        schedule = module_fit.learning_rates(
            config.lr, config.lr_factor, config.lr_step_epochs, config.num_epochs, updates
        )
        options = module_fit.optimizer_options(
            config.optimizer, config.lr, config.mom, config.wd, schedule, begin * updates
        )
        compression = {"type": config.gc_type, "threshold": config.gc_threshold} if config.gc_type != "none" else None
        module = mx.mod.Module(symbol, context=devices, work_load_list=loads, compression_params=compression)
        metric = module_fit.metrics(config.top_k, config.losses)

        # ---- train
        def epoch_ended(epoch: int, symbol: Any, arrays: module_fit.Arrays, _: module_fit.Arrays) -> None:
            module_fit.check_finite(epoch, arrays)
            if config.model_prefix is not None and (epoch + 1) % config.save_period == 0:
                module_fit.save(module_fit.checkpoint_prefix(config.model_prefix, job.rank), epoch + 1, symbol, arrays)
            for name, value in test.score(module, metric):
                logging.info("Epoch[%d] Validation-%s=%f", epoch, name, value)

        module.fit(
            train_batches,
            eval_metric=metric,
            kvstore=job.store,
            optimizer=config.optimizer,
            optimizer_params=options,
            arg_params=weights,
            begin_epoch=begin,
            num_epoch=config.num_epochs,
            batch_end_callback=mx.callback.Speedometer(config.batch_size, config.disp_batches),
            epoch_end_callback=epoch_ended,
        )


def _order(config: Config, job: Any, num_images: int) -> tuple[Callable[[int], Any], int]:
    """Returns (epoch -> the images of each batch of this worker, batches per epoch)."""
    from . import digits

    num_examples, batch_size = config.num_examples or num_images, config.batch_size
    key: tuple[int, ...] = ()
    rank, num_workers = job.rank, job.num_workers
    if job.asynchronous:
        # As in fit.py: all images, each worker by itself.
        rank, num_workers, key = 0, 1, (job.rank,)
    num_batches = digits.batches_per_epoch(num_examples, num_workers, batch_size)
    if num_workers > 1:
        logging.info("Resizing training data to %d batches per machine", num_batches)

    def order(epoch: int) -> Any:
        return digits.shuffled(num_images, num_batches, batch_size, rank, num_workers, config.seed, epoch, *key)

    return order, num_batches


def _check_sizes(config: Config, images: dict[str, ImageSet], smallest: int) -> None:
    sizes = {split: found.image_NHW.shape[1:] for split, found in images.items()}
    if sizes["train"] != sizes["t10k"]:
        raise ValueError(
            f"{config.data_dir}: training images of {sizes['train']} pixels, test images of {sizes['t10k']}"
        )
    if min(sizes["train"]) < smallest:
        raise ValueError(
            f"{config.data_dir}: images of {sizes['train']} pixels; --network {config.network} needs {smallest} x "
            f"{smallest} or more"
        )


def _numbers(flag: str, text: str, kind: Any) -> list[Any]:
    try:
        return [kind(word) for word in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"{flag} {text!r}: expected numbers with commas between them") from None


@told_as_usage
def parse(arguments: list[str]) -> Config:
    """Parses the command line: configuration. Raises ValueError for MXNet's options that are unsupported here."""
    return read(Config, arguments, "train.py mnist --engine mxnet", elsewhere=ELSEWHERE)


# Rejected flags or values: reason and remedy.
ELSEWHERE = {
    "kv_store horovod": "MXNet 1.9.1 makes it a store of one process; give dist_sync, with `partial-fc launch`",
    "kv_store dist": "MXNet takes it for dist_sync and forgets to divide by the number of workers; give dist_sync",
    "dtype float16": "MXNet 1.9.1 has no float16 products on CPUs; recipe mnist on PyTorch has --precision fp16",
    "optimizer lbsgd": "it is left out; give sgd, and more workers for larger batches",
    "optimizer lbnag": "it is left out; give nag, and more workers for larger batches",
    "monitor": "MXNet's Monitor, which prints what every operator gives, is left out",
    "add-stn": "the spatial transformer is left out; --network lenet or mlp",
    "num-layers": "lenet and mlp have their layers; networks with a choice of them are recipe imagenet's",
    "image-shape": "the images are as large as the files say",
    "test-io": "the images lie in memory, there is no reading to measure (see benchmarks/data.py for others)",
    **dict.fromkeys(
        ("profile-worker-suffix", "profile-server-suffix"),
        "MXNet's profiler is left out: mx.profiler in a script of your own has it",
    ),
    "use-imagenet-data-augmentation": "digits are not augmented; recipe imagenet has that",
    "macrobatch-size": "it is lbsgd's, which is left out; give a larger --batch-size, or more workers",
    **dict.fromkeys(("warmup-epochs", "warmup-strategy"), "it is lbsgd's, which is left out; give a smaller --lr"),
}
_ONLY_THERE = ("kv_store", "network", "disp_batches", "num_epochs", "model_prefix", "gc_type")


@told_as_usage
def asked_for(arguments: list[str]) -> bool:
    """Tells whether --engine mxnet is given. Raises ValueError for flags that need it without it."""
    found, _ = split(arguments, ("engine", *_ONLY_THERE), {name: {"nargs": "?", "const": ""} for name in _ONLY_THERE})
    for name in _ONLY_THERE:
        if name in found and "engine" not in found:
            raise ValueError(
                f"{flag(name)} is of MXNet's train_mnist.py: add --engine mxnet (or see the tutorial's --help)"
            )
    return found.get("engine") == "mxnet"
