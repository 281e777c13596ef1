"""Flags of MXNet 1.9.1's train_mnist.py and common/fit.py that recipe `mnist --engine mxnet` rejects, and why."""

from collections.abc import Iterator
from itertools import pairwise

from partial_fc.flags import told_as_usage

# Rejected flags or values: reason and remedy.
ELSEWHERE = {
    "kv_store dist": "MXNet takes it for dist_sync and forgets to divide by the number of workers; give dist_sync",
    "dtype float16": "MXNet 1.9.1 has no float16 products on CPUs; recipe mnist on PyTorch has --precision fp16",
    "optimizer lbsgd": "it is left out; give sgd, and more workers for larger batches",
    "optimizer lbnag": "it is left out; give nag, and more workers for larger batches",
    "monitor": "MXNet's Monitor, which prints what every operator gives, is left out",
    "add-stn": "the spatial transformer is left out; --network lenet or mlp",
    "num-layers": "lenet and mlp have their layers; networks with a choice of them are recipe imagenet's",
    "image-shape": "the images are as large as the files say",
    "test-io": "the images lie in memory, there is no reading to measure; `partial-fc bench data` is for other sets",
    "profile-worker-suffix": "MXNet's profiler is left out: mx.profiler in a script of your own has it",
    "profile-server-suffix": "MXNet's profiler is left out, also that of the servers",
    "use-imagenet-data-augmentation": "digits are not augmented; recipe imagenet has that",
    "macrobatch-size": "it is lbsgd's, which is left out; give a larger --batch-size, or more workers",
    "warmup-epochs": "it is lbsgd's, which is left out; give a smaller --lr",
    "warmup-strategy": "it is lbsgd's, which is left out; give a smaller --lr",
}
_ONLY_THERE = ("kv-store", "network", "disp-batches", "num-epochs", "model-prefix", "gc-type")


@told_as_usage
def asked_for(arguments: list[str]) -> bool:
    """Tells whether --engine mxnet is given. Raises ValueError for flags that need it without it."""
    found = dict(_pairs(arguments))
    for name in _ONLY_THERE:
        if name in found and "engine" not in found:
            raise ValueError(
                f"--{name} is of MXNet's train_mnist.py: add --engine mxnet (or see the tutorial's --help)"
            )
    return found.get("engine") == "mxnet"


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, value) of each flag; the value is "" before another flag."""
    for word, following in pairwise([*arguments, ""]):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            yield name.replace("_", "-"), value or ("" if following.startswith("--") else following)
