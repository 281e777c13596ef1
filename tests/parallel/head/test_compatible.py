"""A head beside an older model's frozen centres, on as many ranks as were launched."""

import pytest
import torch

from partial_fc.head import CosFace
from partial_fc.head.compatible import Compatible
from partial_fc.head.protocol import check_head
from partial_fc.head.rows import RowAdagrad
from tests import head_reference as reference
from tests.flat import flat_head
from tests.parallel.head.test_head_kinds import CLASSES, D, batch_of, relative_error

NARROW, WEIGHT, MARGIN = D - 3, 0.5, CosFace(8.0, 0.2)


def head_of(world, rate: float, **more):
    return flat_head(CLASSES, D, MARGIN, rate, world, 3, dtype=torch.float64, impl="plain", **more)


def compatible(world, rate: float) -> Compatible:
    old = flat_head(
        CLASSES, NARROW, MARGIN, rate, world, 4, RowAdagrad(), dtype=torch.float64, impl="plain", name="old"
    )
    return Compatible(head_of(world, rate), old, WEIGHT)


def all_centres(world, head) -> torch.Tensor:
    return world.all_gather(head.centres, name="t/centres")


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_the_old_centres_pull_the_features_and_stay(world, rate):
    """The loss and its gradient are a dense model's; new centres move as without the old ones."""
    both, alone = compatible(world, rate), head_of(world, rate)
    check_head(both)
    old_CD = all_centres(world, both.old)
    for step in range(4):
        feat_GD, label_G, part = batch_of(world, seed=step)
        feat_BD = feat_GD[part].clone().requires_grad_()
        loss = both(feat_BD, label_G[part])
        loss.backward()
        if rate == 1:
            dense_GD = feat_GD.clone().requires_grad_()
            exact = reference.loss(dense_GD, label_G, all_centres(world, both.head), MARGIN)
            exact = exact + WEIGHT * reference.loss(dense_GD[:, :NARROW], label_G, old_CD, MARGIN)
            exact.backward()
            assert loss.item() == pytest.approx(exact.item(), rel=1e-11)
            assert relative_error(feat_BD.grad, dense_GD.grad[part]) < 1e-11
        alone(feat_GD[part].clone().requires_grad_(), label_G[part]).backward()
        assert torch.equal(both.gradient_square_sum(), alone.gradient_square_sum())
        for head in (both, alone):
            head.step(0.1)
    assert torch.equal(both.head.centres, alone.centres)
    assert torch.equal(all_centres(world, both.old), old_CD)
    assert both.old.num_steps == 4, "its negatives are drawn anew for each step"


def test_what_does_not_go_together(world):
    for size, classes, name in ((D + 1, CLASSES, "old"), (D, CLASSES + 1, "old"), (D, CLASSES, "")):
        old = flat_head(classes, size, MARGIN, 1.0, world, 4, name=name)
        with pytest.raises(ValueError, match=f"the older head '{name}' takes {size} numbers for {classes}"):
            Compatible(flat_head(CLASSES, D, MARGIN, 1.0, world, 3), old)
