"""Verification over real ranks equals one process that does all of it."""

import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.evaluate.verification import Verification
from tests.unit.evaluate.test_verification import SIZE, make_set


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
def test_equals_one_process_to_the_last_bit(world, tmp_path, embed, batch_size):
    """Of 45 pairs, equal on every rank though each writes its own."""
    make_set(tmp_path / "unseen.bin", 45)
    together, alone = (
        dict(Verification(tmp_path / "unseen.bin", SIZE, batch_size).run(embed, of)) for of in (world, SingleWorld())
    )
    np.testing.assert_equal(together, alone)  # NaN equals NaN here
    assert 0.5 < together["unseen/accuracy"] < 1.0
