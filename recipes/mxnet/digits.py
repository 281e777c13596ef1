"""Data and networks of MXNet's train_mnist.py: MNIST's images as batches for Module, and lenet and mlp.

The networks have the sizes and names of example/image-classification/symbols in MXNet 1.9.1, so that its files fit;
lenet's layers are unnamed there and keep MXNet's automatic numbers.

N images, W workers, B images of a worker's batch.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc.counter_rng import derive_key, permute
from partial_fc.data.idx import ImageSet

from .library import mx

_ORDER = 0  # what a key of `derive_key` is for
SMALLEST_SIDE = {"lenet": 16, "mlp": 1}


def batches_per_epoch(num_examples: int, num_workers: int, batch_size: int) -> int:
    """Returns each worker's batches: ceil(int(N / W) / B), as in MXNet's fit.py."""
    share = num_examples // num_workers
    if not share:
        raise ValueError(f"--num-examples {num_examples} for {num_workers} workers; expected at least one for each")
    return math.ceil(share / batch_size)


def shuffled(num_images: int, num_batches: int, batch_size: int, rank: int, num_workers: int, *key: int) -> NDArray:
    """Returns a worker's images in an epoch, (num_batches, B). Batch t of all workers, concatenated, is batch t of one
    worker with a batch W times as large: every image occurs before any repeats, for the same key."""
    start_T1 = torch.arange(num_batches)[:, None] * (num_workers * batch_size) + rank * batch_size
    position_TB = (start_T1 + torch.arange(batch_size)) % num_images
    return permute(position_TB.flatten(), num_images, derive_key(_ORDER, *key)).view_as(position_TB).numpy()


def in_order(num_images: int, batch_size: int) -> NDArray:
    """Returns all images in order, (batches, B); the last batch is filled from the first image on."""
    num_batches = math.ceil(num_images / batch_size)
    return np.arange(num_batches * batch_size).reshape(num_batches, batch_size) % num_images


class DigitBatches(mx.io.DataIter):
    """Batches of images, float32 (B, 1, H, W) from 0 to 1, and labels, (B,)."""

    def __init__(self, images: ImageSet, order: Callable[[int], NDArray], epoch: int = 0):
        """order: epoch -> (batches, B), image numbers. epoch: the first one; `reset` advances to the next."""
        self._images, self._order, self._epoch = images, order, epoch
        self._index_TB, self._next = order(epoch), 0
        super().__init__(batch_size=self._index_TB.shape[1])
        _, height, width = images.image_NHW.shape
        self.provide_data = [mx.io.DataDesc("data", (self.batch_size, 1, height, width))]
        self.provide_label = [mx.io.DataDesc("softmax_label", (self.batch_size,))]

    def reset(self) -> None:
        self._epoch += 1
        self._index_TB, self._next = self._order(self._epoch), 0

    def next(self) -> Any:
        if self._next == len(self._index_TB):
            raise StopIteration
        index_B = self._index_TB[self._next]
        self._next += 1
        image_B1HW = self._images.image_NHW[index_B][:, None].astype(np.float32) / np.float32(255)
        label_B = self._images.label_N[index_B].astype(np.float32)
        return mx.io.DataBatch([mx.nd.array(image_B1HW)], [mx.nd.array(label_B)], pad=0)


class TestImages:
    """The test images, each counted once. (Module's own `score` also counts the padding of the last batch.)"""

    __test__ = False

    def __init__(self, images: ImageSet, batch_size: int):
        self._label_N = images.label_N
        self._batches = DigitBatches(images, lambda _: in_order(len(images.label_N), batch_size))

    def score(self, module: Any, metric: Any) -> list[tuple[str, float]]:
        """Returns (name, value) of each metric."""
        metric.reset()
        probability_NC = module.predict(self._batches)[: len(self._label_N)]
        metric.update([mx.nd.array(self._label_N)], [probability_NC])
        return metric.get_name_value()


def network(name: str, num_classes: int) -> mx.sym.Symbol:
    """Returns the network with its softmax; its inputs are "data", (B, 1, H, W), and "softmax_label", (B,)."""
    data = mx.sym.Variable("data")
    logits = {"lenet": _lenet, "mlp": _mlp}[name](data, num_classes)
    return mx.sym.SoftmaxOutput(logits, name="softmax")


def _mlp(data: mx.sym.Symbol, num_classes: int) -> mx.sym.Symbol:
    x = mx.sym.Flatten(data, name="flatten0")
    for number, width in enumerate((128, 64), start=1):
        x = mx.sym.FullyConnected(x, num_hidden=width, name=f"fc{number}")
        x = mx.sym.Activation(x, act_type="relu", name=f"relu{number}")
    return mx.sym.FullyConnected(x, num_hidden=num_classes, name="fc3")


def _lenet(data: mx.sym.Symbol, num_classes: int) -> mx.sym.Symbol:
    x = data
    for number, width in enumerate((20, 50)):
        x = mx.sym.Convolution(x, kernel=(5, 5), num_filter=width, name=f"convolution{number}")
        x = mx.sym.Activation(x, act_type="tanh", name=f"activation{number}")
        x = mx.sym.Pooling(x, pool_type="max", kernel=(2, 2), stride=(2, 2), name=f"pooling{number}")
    x = mx.sym.Flatten(x, name="flatten0")
    x = mx.sym.FullyConnected(x, num_hidden=500, name="fullyconnected0")
    x = mx.sym.Activation(x, act_type="tanh", name="activation2")
    return mx.sym.FullyConnected(x, num_hidden=num_classes, name="fullyconnected1")
