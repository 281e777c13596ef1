"""What the tests of recipe `mnist` run, and what they compare it with."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DistributedSampler

from demo.make_digits import load, write_idx
from partial_fc.data.idx import names, read_set
from recipes.mnist.convnet import ConvNet
from tests.running import Given, endings, here, several

NUM_TRAIN, NUM_TEST = 151, 101  # no number of processes divides them
# An epoch has 7 updates: 6 of 24 images, and one of the 7 that are left.
GLOBAL_BATCH = 24


def some_digits(folder: Path) -> Path:
    """Some of scikit-learn's digits, as files in folder/MNIST/raw; returns the folder."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for (split, found), number in zip(load().items(), (NUM_TRAIN, NUM_TEST), strict=True):
        arrays = found.image_NHW[:number], found.label_N[:number].astype(np.uint8)
        for name, array in zip(names(split), arrays, strict=True):
            write_idx(raw / name, array)
    return folder


def train_here(data: Path, models_root: Path, flags: str = "") -> None:
    """In this process."""
    words = f"--data-dir {data} --models-root {models_root} --batch-size {GLOBAL_BATCH} --lr 0.05 --precision fp32"
    assert here("recipes.mnist.main", shlex.split(f"{words} {flags}")) == 0


def train_several(data: Path, runs: list[tuple[Path, str]], num_ranks: int) -> str:
    """Each (folder, flags) after the other, in one launch. Returns what it printed."""
    words = [f"--data-dir {data} --models-root {root} --lr 0.05 {flags}" for root, flags in runs]
    printed = several([Given("recipes.mnist.main", shlex.split(each)) for each in words], num_ranks)
    assert endings(printed, 0) == ["0"] * len(runs), printed
    return printed


def reference(data: Path, num_ranks: int, epochs: int, lr: float, dtype: torch.dtype) -> tuple[list[float], dict]:
    """The tutorial's loop, written anew for one process: a replica for each rank, whose gradients are averaged. Returns
    the losses, averaged over the ranks, and the weights."""
    image_NHW, label_N = (torch.tensor(t) for t in read_set(data, "train"))
    image_N1HW = (image_NHW / 255).unsqueeze(1).to(dtype)
    replicas = []
    for _ in range(num_ranks):
        torch.manual_seed(0)
        replicas.append(ConvNet().to(dtype))
    places: Any = range(len(label_N))
    samplers: list[DistributedSampler] = [DistributedSampler(places, num_ranks, r) for r in range(num_ranks)]
    curve, batch_size = [], GLOBAL_BATCH // num_ranks
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [torch.tensor(list(sampler)).split(batch_size) for sampler in samplers]
        for batch_of_rank in zip(*orders, strict=True):
            each = [
                F.cross_entropy(net(image_N1HW[batch]), label_N[batch])
                for net, batch in zip(replicas, batch_of_rank, strict=True)
            ]
            loss = torch.stack(each).mean()
            gradients = [torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for net in replicas]
            with torch.no_grad():
                for parts in zip(*(net.parameters() for net in replicas), *gradients, strict=True):
                    step = sum(parts[num_ranks:])
                    for p in parts[:num_ranks]:
                        p -= lr * step
            curve.append(loss.item())
    return curve, dict(replicas[0].named_parameters())


def assert_same_weights(root: Path, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    found = load_file(root / "model.safetensors")
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t.detach(), rtol=tolerance, atol=tolerance)
