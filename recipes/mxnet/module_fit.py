"""Arguments of MXNet's Module.fit: devices, learning rates, first weights, callbacks after each epoch."""

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partial_fc.files import replacing
from partial_fc.foreign import ndarray_file
from partial_fc.foreign.state_dicts import misfits

from .library import mx

# Optimizers that take fit.py's --mom; the others have none, or use it differently.
_WITH_MOMENTUM = ("sgd", "nag", "signum", "dcasgd")
Arrays = dict[str, Any]


@contextmanager
def log_lines(rank: int) -> Iterator[None]:
    """Logs MXNet's and the recipe's messages, with time and Node[rank], on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)-15s Node[{rank}] %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def contexts(gpus: list[int], num_cpus: int) -> list[Any]:
    """Returns the devices. Several CPU devices emulate GPUs: same results, no faster than one."""
    if not gpus:
        return [mx.cpu(number) for number in range(num_cpus)]
    found = mx.context.num_gpus() if mx.runtime.Features().is_enabled("CUDA") else None
    if found is None:
        raise ValueError(
            f"--gpus {','.join(map(str, gpus))}: this MXNet was built for CPUs only. Leave --gpus away, or install "
            "MXNet for CUDA (mxnet-cu112, mxnet-cu117; not tried here)"
        )
    absent = [number for number in gpus if number >= found]
    if absent:
        raise ValueError(f"--gpus {','.join(map(str, gpus))}: MXNet sees {found} GPUs here, so there is no {absent[0]}")
    return [mx.gpu(number) for number in gpus]


def shares(batch_size: int, loads: list[float]) -> list[int]:
    """Returns each device's share of a batch by MXNet's own rule, which rounds and gives the rest to the last."""
    try:
        slices = mx.executor_manager._split_input_slice(batch_size, loads)
    except ValueError:
        raise ValueError(
            f"--work-load-list {','.join(f'{load:g}' for load in loads)} leaves a device without images of a batch of "
            f"{batch_size}; give a larger --batch-size, or loads that differ less"
        ) from None
    return [part.stop - part.start for part in slices]


def optimizer_options(
    optimizer: str, lr: float, momentum: float, wd: float, schedule: Any, begin_num_update: int
) -> dict[str, Any]:
    """Returns the optimizer's arguments. begin_num_update: updates before this start, for the schedule."""
    options = {"learning_rate": lr, "wd": wd, "lr_scheduler": schedule, "begin_num_update": begin_num_update}
    if optimizer in _WITH_MOMENTUM:
        options["momentum"] = momentum
    return options


def learning_rates(lr: float, factor: float, step_epochs: str, num_epochs: int, updates: int) -> Any:
    """Returns the schedule of --lr-step-epochs, None for a constant rate. updates: per epoch."""
    if factor >= 1:
        return None
    power = re.fullmatch(r"pow[- ]*(.+)", step_epochs)
    if power:
        return mx.lr_scheduler.PolyScheduler(num_epochs * updates, lr, float(power[1]))
    steps = [updates * int(epoch) for epoch in step_epochs.split(",")]
    return mx.lr_scheduler.MultiFactorScheduler(step=steps, factor=factor, base_lr=lr)


def initializer(name: str) -> Any:
    """Returns the --initializer; default: Xavier's for these networks in fit.py."""
    init = mx.init
    makers: dict[str, Callable[[], Any]] = {
        "default": lambda: init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        "xavier": init.Xavier,
        "msra": init.MSRAPrelu,
        "orthogonal": init.Orthogonal,
        "normal": init.Normal,
        "uniform": init.Uniform,
        "one": init.One,
        "zero": init.Zero,
    }
    return makers[name]()


def first_weights(symbol: Any, data: Any, how: Any, seed: int) -> Arrays:
    """Returns the first weights, a function of the seed alone."""
    mx.random.seed(seed)
    np.random.seed(seed)  # numpy draws the orthogonal ones
    start = mx.mod.Module(symbol)
    start.bind(data.provide_data, data.provide_label, for_training=False)
    start.init_params(how)
    return start.get_params()[0]


def metrics(top_k: int, losses: list[str]) -> Any:
    """Returns accuracy, and the metrics of --top-k and --loss."""
    top = [mx.metric.create("top_k_accuracy", top_k=top_k)] if top_k else []
    return mx.metric.create(["accuracy", *top, *losses])


def checkpoint_prefix(prefix: str, rank: int) -> str:
    """Returns the file prefix of a worker: each r > 0 has its own, since they may share a disk."""
    return prefix if rank == 0 else f"{prefix}-{rank}"


def save(prefix: str, epoch: int, symbol: Any, arrays: Arrays) -> None:
    """Writes prefix-symbol.json and prefix-%04d.params, for mx.model.load_checkpoint."""
    with replacing(Path(f"{prefix}-symbol.json")) as partial:
        symbol.save(str(partial))
    path = Path(f"{prefix}-{epoch:04d}.params")
    with replacing(path) as partial:
        mx.nd.save(str(partial), {f"arg:{name}": array for name, array in arrays.items()})
    logging.info('Saved checkpoint to "%s"', path)


def load(prefix: str, epoch: int, rank: int, expected: Arrays) -> Arrays:
    """Loads the weights of a checkpoint. expected: the network's, with the required names and shapes."""
    own = checkpoint_prefix(prefix, rank)
    path = Path(f"{own if Path(f'{own}-{epoch:04d}.params').exists() else prefix}-{epoch:04d}.params")
    if not path.exists():
        raise ValueError(f"--load-epoch {epoch}: there is no {path}; --model-prefix {prefix} says where to look")
    arrays = {name.removeprefix("arg:"): t for name, t in ndarray_file.read(path).items()}
    if problems := misfits(arrays, {name: torch.empty(array.shape) for name, array in expected.items()}):
        raise ValueError(
            f"{path} is of another network: {problems}. --network, --num-classes and the images' size must be those "
            "that it was trained with"
        )
    logging.info("Loaded model %s", path)
    return {name: mx.nd.array(arrays[name].numpy()) for name in expected}


def check_finite(epoch: int, arrays: Arrays) -> None:
    """Raises FloatingPointError for NaN or Inf in the weights, before they are saved."""
    for name, array in arrays.items():
        if not math.isfinite(float(mx.nd.sum(array).asscalar())):
            raise FloatingPointError(
                f"{name} has NaN or Inf after epoch {epoch}: the learning rate is too high; give a smaller --lr. "
                "Nothing of this epoch was saved"
            )
