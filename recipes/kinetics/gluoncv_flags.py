"""Command line of GluonCV's train_recognizer.py: flags with another name here, and flags without effect here.
(recipes/kinetics.py has flags of the same name and meaning.)

    python train_recognizer.py --dataset kinetics400 --model slowfast_4x16_resnet50_kinetics400 --num-gpus 8 ...
    python train.py kinetics   the same
"""

from typing import Any

from partial_fc import comm
from partial_fc.flags.known import count, split

# Theirs -> ours.
RENAMED = {
    "num-epochs": "epochs",
    "wd": "weight-decay",
    "log-interval": "frequent",
    "save-dir": "models-root",
    "lr-decay": "lr-factor",
}
_MODES = {"step": ["step"], "cosine": ["cosine"], "poly": ["polynomial", "--lr-power", "2"]}
# Of the tutorial's command.
_WITHOUT_EFFECT = {
    "mode": "there is one way to run a network here",
    "use-decord": "our own reader gives the same frames",
    "slowfast": "all networks here are SlowFast ones, trained with NAG",
}
_SWITCHES = ("use-decord", "slowfast", "use-amp", "use-pretrained", "more-fix-crop")
_REFUSED = {
    "resume-states": "momentum is not read from GluonCV's files; leave it out: it starts from 0",
    "use-pretrained": "nothing is downloaded; give the published file with --resume-params",
    "hashtag": "nothing is downloaded; give the published file with --resume-params",
}
_WORKERS = 4  # default per machine


def translate(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns (our arguments, notes for the user). Raises ValueError for invalid values."""
    options: dict[str, dict[str, Any]] = {name: {"action": "store_true", "default": None} for name in _SWITCHES}
    options["num-data-workers"] = {"short": "-j"}
    more = ("num-gpus", "num-data-workers", "kvstore", "dtype", "lr-mode", "scale-ratios", "new-step")
    given, ours = split(arguments, (*RENAMED, *_WITHOUT_EFFECT, *_REFUSED, *_SWITCHES, *more), options)
    for name in _REFUSED.keys() & given.keys():
        raise ValueError(f"--{name}: {_REFUSED[name]}")
    notes = [f"--{name} without effect: {why}" for name, why in _WITHOUT_EFFECT.items() if name in given]
    for name in RENAMED.keys() & given.keys():
        ours += [f"--{RENAMED[name]}", given[name]]
    if "kvstore" in given:
        notes.append(_kvstore(given["kvstore"]))
    ours += _choices(given)
    gpus = count(given, "num-gpus", 0) if "num-gpus" in given else 1
    processes = comm.processes_here(max(1, gpus))
    if "num-gpus" in given:
        ours += _processes(gpus, processes)
    workers = count(given, "num-data-workers", 0) if "num-data-workers" in given else _WORKERS
    each = max(1, workers // processes)
    ours += ["--num-workers", str(each)]
    notes.append(f"--num-data-workers {workers}, of this machine: {each} threads for each of its {processes} processes")
    return ours, notes


def _processes(gpus: int, local: int) -> list[str]:
    """Returns flags for the processes. local: those of this machine, which a launcher may have started."""
    if not gpus:
        return ["--device", "cpu"]
    started = comm.detect()
    if started.backend == "single" or started.is_host:
        return ["--gpus", str(gpus)]
    if gpus != local:
        raise ValueError(
            f"--num-gpus {gpus}, but the launcher has started {local} processes on this machine; start one for "
            "each GPU, as in horovodrun -H ip1:8,ip2:8, or one on each machine with partial-fc launch"
        )
    return []


def _choices(given: dict[str, Any]) -> list[str]:
    """Converts flags whose values differ here."""
    ours: list[str] = []
    if "lr-mode" in given:
        if given["lr-mode"] not in _MODES:
            raise ValueError(f"--lr-mode is {given['lr-mode']}; expected {', '.join(_MODES)}")
        ours += ["--lr-scheduler", *_MODES[given["lr-mode"]]]
    dtype = given.get("dtype", "float32")
    if dtype not in ("float32", "float16"):
        raise ValueError(f"--dtype is {dtype}; expected float32 or float16 (or --precision bf16)")
    if "dtype" in given or "use-amp" in given:
        ours += ["--precision", "fp16-o2" if dtype == "float16" else "fp16" if "use-amp" in given else "fp32"]
    if "scale-ratios" in given:
        ours += ["--scale-ratios", *given["scale-ratios"].replace(",", " ").split()]
    if "more-fix-crop" in given:  # GluonCV's flag turns it off
        ours += ["--no-all-places"]
    if given.get("new-step", "1") != "1":
        raise ValueError(f"--new-step is {given['new-step']}; GluonCV's SlowFast, too, takes only 1")
    return ours


def _kvstore(name: str) -> str:
    if "async" in name:
        raise ValueError(
            f"--kvstore {name}: each worker would train on weights that others change meanwhile; here all make every "
            "update together. Take --kvstore dist_sync_device, and start with horovodrun or --gpus"
        )
    return f"--kvstore {name}: there are no servers, but an all-reduce (docs/recipes/kinetics.md)"
