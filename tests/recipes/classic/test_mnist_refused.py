"""What recipe `mnist` does not take: flags, data, checkpoints of other runs."""

import shlex

import numpy as np
import pytest

from recipes.mnist import parse
from tests.recipes.classic.mnist_job import train_here, write_set


def test_the_tutorials_command_line():
    config = parse(shlex.split("-n 2 -g 2 -nr 1 --epochs 5 --batch_size 64 --master-addr ip1"))
    assert (config.launch.nodes, config.launch.gpus, config.launch.nr) == (2, 2, 1)
    assert (config.schedule.epochs, config.optim.batch_size) == (5, 64)
    config = parse([])
    given = config.schedule.epochs, config.schedule.lr, config.optim.batch_size, config.mnist.n_workers
    assert given == (2, 1e-4, 100, 0)


def test_data_that_cannot_be_used(digits, tmp_path):
    with pytest.raises(ValueError, match=r"no MNIST files in .*`partial-fc data digits"):
        train_here(tmp_path / "nothing", tmp_path / "run")
    large = np.zeros((4, 32, 32), np.uint8), np.zeros(4, np.uint8)
    data = write_set(tmp_path / "large", train=large, t10k=large)
    with pytest.raises(ValueError, match=r"the train images have 32 x 32 pixels; the ConvNet takes 28 x 28 only"):
        train_here(data, tmp_path / "run")


def test_the_log_of_another_recipe(tmp_path):
    with pytest.raises(ValueError, match="--log-style insightface-mxnet is for recipe face; recipe mnist has lines"):
        train_here(tmp_path, tmp_path / "run", "--log-style insightface-mxnet")
