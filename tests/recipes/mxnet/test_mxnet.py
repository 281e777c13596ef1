"""MXNet 1.9.1 beside today's numpy, in processes of their own."""

import pytest

from tests.house.test_head_alone import python

TRAIN = """
import numpy as np
before = dict(vars(np))
from recipes.mxnet.library import mx

after = vars(np)
removed = {"bool", "int", "NAN", "NINF", "product", "msort", "in1d", "npv", "Inf"} - before.keys()
assert removed & after.keys() <= {"bool", "Inf"}, "lent, and taken back but for what MXNet looks up later"
assert all(after[name] is value for name, value in before.items()), "nothing is replaced"

mx.random.seed(0)
np.random.seed(0)
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(4, 3, activation="relu"), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Dense(3))
net.initialize()
net.hybridize()
images, labels = mx.nd.random.uniform(shape=(6, 1, 8, 8)), mx.nd.array([0, 1, 2, 0, 1, 2])
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()
for _ in range(30):
    with mx.autograd.record():
        loss = criterion(net(images), labels)
    loss.backward()
    trainer.step(6)
recordio = mx.recordio
packed = recordio.pack_img(recordio.IRHeader(0, [7.0, 10.0], 3, 0), np.zeros((4, 4, 3), np.uint8), img_fmt=".png")
header, image = recordio.unpack_img(packed)
assert (header.label.tolist(), header.id, image.shape) == ([7.0, 10.0], 3, (4, 4, 3))
print(loss.mean().asscalar())
"""


@pytest.mark.mxnet
def test_it_imports_and_trains_and_leaves_numpy_alone():
    pytest.importorskip("recipes.mxnet.library")
    done = python(TRAIN)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.01


BESIDE_TORCH = """
import os
os.environ.pop("OMP_NUM_THREADS", None)
import torch
threads = torch.get_num_threads()
from recipes.mxnet.library import mx
assert torch.get_num_threads() == threads, (torch.get_num_threads(), threads)
assert not {"OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"} & os.environ.keys()
product = mx.nd.dot(mx.nd.ones((300, 300)), mx.nd.ones((300, 300)))
print(int(product.sum().asscalar()), int((torch.ones(300, 300) @ torch.ones(300, 300)).sum()))
"""


@pytest.mark.mxnet
def test_after_torch_it_runs_and_leaves_torch_its_threads():
    pytest.importorskip("recipes.mxnet.library")
    done = python(BESIDE_TORCH)
    assert (done.returncode, done.stdout) == (0, "27000000 27000000\n"), done.stderr


@pytest.mark.mxnet
@pytest.mark.parametrize("name", ["mxnet", "distutils"])
def test_what_is_missing_is_named_with_the_command(name):
    pytest.importorskip("recipes.mxnet.library")
    done = python(f"import sys; sys.modules[{name!r}] = None; import recipes.mxnet.library")
    assert done.returncode == 1
    assert "pip install" in done.stderr
    assert {"mxnet": "--no-deps mxnet==", "distutils": "setuptools"}[name] in done.stderr
