"""A loader that is sent elsewhere gives what a new one gives that starts there."""

import pytest
import torch

from partial_fc.data import Loader, Synthetic
from partial_fc.data.augment import mirror


def loader(position: int = 0) -> Loader:
    return Loader(
        Synthetic(7, 8, 50),
        image_size=8,
        batch_size=3,
        rank=1,
        world_size=2,
        seed=5,
        position=position,
        augment=mirror,
    )


@pytest.mark.parametrize("position", [0, 12, 61])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_go_to(position, taken):
    with loader() as moved, loader(position) as fresh:
        for _ in range(taken):
            next(moved)
        moved.go_to(position)
        assert moved.position == position
        for _ in range(4):
            one, other = next(moved), next(fresh)
            assert torch.equal(one.image_B3HW, other.image_B3HW)
            assert torch.equal(one.key_B, other.key_B)
            assert (one.position, one.epoch) == (other.position, other.epoch)
        assert moved.position == position + 4 * 6
