"""The test of recipe imagenet with --head partial-fc: the class of the nearest centre on any rank is predicted."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from partial_fc.data import Synthetic
from partial_fc.data.sample import Sample
from partial_fc.data.transform import as_stored
from partial_fc.head import CosFace
from recipes.imagenet.epochs import PartialFCTest
from tests.flat import flat_head
from tests.unit.thread_world import in_world

C, N, D = 7, 23, 9


class Images(Synthetic):
    def __init__(self):
        super().__init__(C, 3, N)

    def read(self, index: int) -> Sample:
        image = np.random.default_rng(index).integers(0, 256, (3, 3, 1), dtype=np.uint8)
        return Sample(image, index % C, index)


def network(input_B: torch.Tensor) -> torch.Tensor:
    return input_B.flatten(1).double() / 128 - 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("sub_centres", [1, 3])
def test_the_numbers_are_those_of_the_dense_cosines(sub_centres, world_size):
    """12 batches and one: ranks have other numbers of batches, or none."""

    def on_rank(world):
        head = flat_head(C, D, CosFace(), sub_centres=sub_centres, world=world, dtype=torch.float64)
        found = []
        for batch_size in (2, N):
            test = PartialFCTest("test", Images(), as_stored, batch_size, top=3, head=head)
            found.append((dict(test.run(network, world)), test.confusion_CC, test.loss))
        return world.all_gather(head.centres, name="t/centres"), found

    for centres, found in in_world(world_size, on_rank):
        samples = [Images().read(index) for index in range(N)]
        feat_ND = network(torch.tensor(np.stack([sample.image for sample in samples])))
        cos_NC = (normalize(feat_ND) @ normalize(centres.reshape(-1, D)).T).unflatten(1, (C, -1)).amax(2)
        label_N, top_NK = torch.arange(N) % C, cos_NC.topk(3).indices
        right_N = top_NK[:, 0] == label_N
        for values, confusion_CC, loss in found:
            assert values == {
                "test/accuracy": right_N.double().mean().item(),
                "test/top3": (top_NK == label_N[:, None]).any(1).double().mean().item(),
            }
            assert int(confusion_CC.diagonal().sum()) == int(right_N.sum())
            assert math.isnan(loss)
