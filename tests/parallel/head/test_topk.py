"""The nearest classes over the ranks that were launched, beside one dense product."""

import os

import pytest
import torch
from torch.nn.functional import normalize

from partial_fc.head import CosFace
from tests.flat import flat_head

D, CLASSES = 24, 301
PATHS = [("plain", torch.float64), ("cpu", torch.float32)]
if os.environ.get("TRITON_INTERPRET") == "1":
    PATHS = [("triton", torch.float32)]


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks bring other numbers of rows, the last of three none."""
    random = torch.Generator().manual_seed(rank)
    num_rows = [6, 3, 0][rank % 3]
    feat_BD = torch.randn(num_rows, D, generator=random, dtype=torch.float64)
    return feat_BD, torch.randint(0, CLASSES, (num_rows,), generator=random)


@pytest.mark.parametrize("sample_rate", [1.0, 0.2])
@pytest.mark.parametrize("sub_centres", [1, 3])
@pytest.mark.parametrize(("impl", "dtype"), PATHS)
def test_nearest_classes_equal_the_dense_ones(world, impl, dtype, sub_centres, sample_rate):
    head = flat_head(
        CLASSES, D, CosFace(), sample_rate, world, dtype=dtype, impl=impl, precision="fp32", sub_centres=sub_centres
    )
    feat_BD, label_B = batch(world.rank)
    cosine_BK, class_BK = head.topk(feat_BD.to(dtype), 100)
    leaf_BD = feat_BD.to(dtype).requires_grad_()
    loss, active_cosine_BK, active_class_BK = head.loss_and_topk(leaf_BD, label_B, 5)
    alone = head(leaf_BD, label_B)
    assert torch.equal(loss, alone)
    assert torch.equal(*(torch.autograd.grad(each, leaf_BD)[0] for each in (loss, alone)))

    label_G = world.all_gather(label_B, name="t/labels")
    active_S = world.all_gather(head._selector.classes(head.active_rows(label_G)), name="t/active")
    centre_CKD = world.all_gather(head.centres, name="t/centres").reshape(CLASSES, -1, D).double()
    cos_BC = (normalize(feat_BD) @ normalize(centre_CKD, dim=2).flatten(0, 1).T).unflatten(1, (CLASSES, -1)).amax(2)
    error = 1e-12 if dtype == torch.float64 else 1e-6
    every_C = torch.arange(CLASSES)
    for found, of_class, cos, classes in (
        (cosine_BK, class_BK, cos_BC.topk(100).values, every_C),
        (active_cosine_BK, active_class_BK, cos_BC[:, active_S].topk(5).values, active_S),
    ):
        torch.testing.assert_close(found.double(), cos, rtol=0, atol=error)
        torch.testing.assert_close(cos_BC.gather(1, of_class), cos, rtol=0, atol=error)
        assert bool(torch.isin(of_class, classes).all())
        assert all(len(set(row)) == len(row) for row in of_class.tolist())
