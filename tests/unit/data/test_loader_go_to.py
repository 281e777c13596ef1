"""A loader that is sent elsewhere gives what a new one gives that starts there."""

import pytest
import torch

from partial_fc.data import Loader, Synthetic
from partial_fc.data.transform import SquareImage, mirror


def loader(position: int = 0) -> Loader:
    return Loader(
        Synthetic(7, 8, 50), SquareImage(8, mirror), batch_size=3, rank=1, world_size=2, seed=5, position=position
    )


@pytest.mark.parametrize("position", [0, 12, 61])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_seek(position, taken):
    with loader() as moved, loader(position) as fresh:
        for _ in range(taken):
            next(moved)
        moved.seek(position)
        assert moved.position == position
        for _ in range(4):
            one, other = next(moved), next(fresh)
            assert torch.equal(one.input_B, other.input_B)
            assert torch.equal(one.key_B, other.key_B)
            assert (one.position, one.epoch) == (other.position, other.epoch)
        assert moved.position == position + 4 * 6
