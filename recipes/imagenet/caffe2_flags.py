"""Command lines of Caffe2's resnet50_trainer and imagenet_trainer: flags with another name here, and the first line
of their log.

    python resnet50_trainer.py --train_data DIR --gpus 0,2 --batch_size 64 --base_learning_rate 0.1 --num_epochs 90
    python train.py imagenet   the same
"""

import argparse
import os
from typing import Any

from partial_fc import comm
from partial_fc.flags.known import count, split

# Theirs -> ours. (recipes/imagenet.py has flags of the same name and meaning.)
RENAMED = {
    "base_learning_rate": "lr",
    "num_epochs": "epochs",
    "num_gpus": "gpus",
    "timeout": "comm-timeout",
    "first_iter_timeout": "start-timeout",
    "distributed_interfaces": "network-interface",
}
_OFF = ("false", "0", "no")
_BATCH_SIZE = "32"  # default per machine
_LOGGED = (
    "train_data", "test_data", "db_type", "num_channels", "image_size", "num_labels", "epoch_size", "weight_decay",
    "num_shards", "shard_id", "run_id", "redis_host", "redis_port", "file_store_path", "load_model_path",
)  # fmt: skip


def translate(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns (our arguments, notes for the user). Converts the batch size of this machine to that of a process. Raises
    ValueError for invalid values."""
    # use_cpu is without a value in one trainer, followed by True or False in another.
    options = {"use_cpu": {"nargs": "?", "const": "True"}, "model": {"nargs": "?", "const": "resnext"}}
    names = (*RENAMED, "use_cpu", "gpus", "batch_size", "dtype", "model", "num_layers", "db_type")
    given, ours = split(arguments, names, options)
    notes: list[str] = []
    gpus = count(given, "num_gpus") if "num_gpus" in given else 1
    if "gpus" in given:
        gpus = given["num_gpus"] = _choose_gpus(str(given["gpus"]), notes)
    for name in RENAMED.keys() & given.keys():
        value = given[name].split(",")[0] if name == "distributed_interfaces" else given[name]
        if value:
            ours += [f"--{RENAMED[name]}", str(value)]
    if given.get("use_cpu", "no").lower() not in _OFF:
        ours += ["--device", "cpu"]
    if given.get("db_type") == "minidb":
        raise ValueError("--db_type minidb: Caffe2's convert_db makes an LMDB of a minidb file")
    if "db_type" in given:
        ours += ["--db_type", given["db_type"]]
    if "dtype" in given:
        if given["dtype"] not in ("float", "float16"):
            raise ValueError(f"--dtype is {given['dtype']}; expected float or float16")
        ours += ["--precision", "fp32" if given["dtype"] == "float" else "fp16-o2"]
    if {"model", "num_layers"} & given.keys():
        if given.get("model", "resnext") != "resnext":
            raise ValueError(f"--model {given['model']} is not here: only resnext, which with one group is a ResNet")
        # imagenet_trainer's networks count and pool as torchvision's do.
        ours += ["--network", f"resnet{given.get('num_layers', 50)}", "--conventions", "torchvision"]
        words = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in ours}
        for name in {"image_mean_per_channel", "image_std_per_channel"} - words:
            ours += [f"--{name}", "128", "128", "128"]  # but with Caffe2's pixels
        notes.append("--model, --num_layers: --conventions torchvision, of Caffe2's pixels (docs/recipes/imagenet.md)")
    given.setdefault("batch_size", _BATCH_SIZE)
    ours += ["--batch-size", str(_of_a_process(count(given, "batch_size"), gpus))]
    return ours, notes


def _of_a_process(batch: int, gpus: int) -> int:
    processes = comm.processes_here(gpus)
    if batch % processes:
        lower = batch // processes * processes
        raise ValueError(
            f"--batch_size {batch}, of this machine, cannot be divided by its {processes} processes; try "
            f"{' or '.join(str(size) for size in (lower, lower + processes) if size)}"
        )
    return batch // processes


def _choose_gpus(text: str, notes: list[str]) -> int:
    """Returns the number of processes for `--gpus 0,2`, and makes only these GPUs visible. A single number is a count,
    as everywhere else here, unless a comma follows it or it is 0."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"--gpus is {text!r}; expected numbers of GPUs as in 0,2")
    if "," not in text and int(text):
        notes.append(f"--gpus {text} is taken as so many processes; Caffe2's GPU number {text} alone is --gpus {text},")
        return int(text)
    if not comm.started_here():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(words)
    return len(words)


def namespace(values: dict[str, Any], processes: int, db_type: str) -> argparse.Namespace:
    """Returns the first line of their log. values: this run's flags, by name. db_type: of the opened database."""
    theirs = {name: values[name] for name in _LOGGED if name in values}
    theirs["db_type"] = db_type  # keeps its position
    theirs |= {"gpus": None, "num_gpus": processes, "batch_size": values["batch_size"] * processes}
    epochs = int(values["epochs"]) if values["epochs"].is_integer() else values["epochs"]
    theirs |= {"base_learning_rate": values["lr"], "num_epochs": epochs}
    theirs["dtype"] = "float16" if str(values["precision"]).startswith("fp16") else "float"
    return argparse.Namespace(**{name: str(v) if v is not None and not isinstance(v, (int, float)) else v
                                 for name, v in theirs.items()})  # fmt: skip
