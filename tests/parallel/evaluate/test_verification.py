"""Verification over real ranks equals one process that does all of it."""

import cv2
import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.data.pairs import write_pairs
from partial_fc.evaluate.verification import Verification

SIZE = 16


@pytest.fixture
def pairs_file(tmp_path):
    """45 pairs, equal on every rank though each writes its own."""
    rng = np.random.default_rng(5)
    same = rng.random(45) < 0.5
    encoded = []
    for is_same in same:
        first = rng.integers(0, 256, (SIZE, SIZE, 3))
        second = first + rng.normal(0, 150, first.shape) if is_same else rng.integers(0, 256, first.shape)
        encoded += [cv2.imencode(".png", image.clip(0, 255).astype(np.uint8))[1].tobytes() for image in (first, second)]
    path = tmp_path / "unseen.bin"
    write_pairs(path, encoded, same.tolist())
    return path


@pytest.fixture
def embed():
    """A small convolutional network: what it gives for an image may depend on the batch in the last bits."""
    torch.manual_seed(3)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.PReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(6)
    )
    network(torch.zeros(2, 3, SIZE, SIZE))
    return lambda image_I3HW: network(image_I3HW.float() / 128 - 1)


@pytest.mark.parametrize("batch_size", [6, 90])  # 15 batches, and 1: some ranks have none
def test_equals_one_process_to_the_last_bit(world, pairs_file, embed, batch_size):
    verification = Verification(pairs_file, SIZE, batch_size)
    together = dict(verification.run(embed, world))
    alone = dict(Verification(pairs_file, SIZE, batch_size).run(embed, SingleWorld()))
    np.testing.assert_equal(together, alone)  # NaN equals NaN here
    assert 0.5 < together["unseen/accuracy"] < 1.0
