"""What callers of the library do with the head on several ranks and our own loop does not."""

import pytest
import torch

from partial_fc.comm import CollectiveError
from partial_fc.head import CosFace, PartialFC
from tests.flat import flat_head, learn

D, CLASSES = 12, 37


def batch(world, num_rows: int = 3):
    generator = torch.Generator().manual_seed(world.rank)
    feat = torch.randn(num_rows, D, generator=generator, dtype=torch.float64)
    return feat, torch.randint(CLASSES, (num_rows,), generator=generator)


def test_where_gradients_are_averaged_features_get_w_times_theirs(world):
    feat, label = batch(world)
    results = []
    for backbone_gradients in ("sum", "average"):
        head = flat_head(CLASSES, D, CosFace(), 0.3, world, dtype=torch.float64, backbone_gradients=backbone_gradients)
        leaf = feat.clone().requires_grad_()
        loss = learn(head, leaf, label)
        results.append((loss.item(), leaf.grad, head.centres.clone()))
    (loss, summed, centres), (other_loss, averaged, other_centres) = results
    assert loss == other_loss
    assert torch.equal(centres, other_centres)
    torch.testing.assert_close(averaged, world.size * summed, rtol=1e-15, atol=0)


def test_evaluation_takes_two_collectives(world):
    head = PartialFC(CLASSES, D, CosFace(), 0.3, world)
    feat, label = batch(world)
    with world.count_traffic() as traffic, torch.no_grad():
        head(feat.float().requires_grad_(), label)
    assert traffic.calls == {"head/gather": 1, "head/softmax": 1}


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (torch.float16, ValueError, r"torch\.float16 on ranks \[1.*torch\.bfloat16 on ranks \[0\]; expected one dtype"),
        (torch.float32, CollectiveError, "head/gather"),
    ],
)
def test_features_have_one_dtype_on_all_ranks(world, other, error, words):
    """Of equal width their bits would be read as other numbers."""
    head = PartialFC(CLASSES, D, CosFace(), 1.0, world)
    feat, label = batch(world)
    feat = feat.to(torch.bfloat16 if world.rank == 0 else other)
    if world.size == 1:
        head(feat, label)
        return
    with pytest.raises(error, match=words) as raised:
        head(feat, label)
    if error is CollectiveError:
        assert str(feat.dtype) in raised.value.__notes__[0]
    head(feat.float(), label)


def test_a_rank_without_rows_trains_where_the_others_do(world):
    """Its features come from no network, so that they require no gradient."""
    heads = [PartialFC(CLASSES, D, CosFace(), 1.0, world) for _ in range(2)]
    feat, label = batch(world, 0 if world.rank == 0 and world.size > 1 else 3)
    for head, requires_grad in zip(heads, (True, len(feat) > 0), strict=True):
        learn(head, feat.float().clone().requires_grad_(requires_grad), label)
    assert torch.equal(heads[0].centres, heads[1].centres)


def test_backward_twice_doubles_the_gradients(world):
    once, twice = (flat_head(CLASSES, D, CosFace(), 0.3, world, dtype=torch.float64) for _ in range(2))
    feat, label = batch(world)
    leaves = [feat.clone().requires_grad_() for _ in range(2)]
    (2 * once(leaves[0], label)).backward()
    loss = twice(leaves[1], label)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-14, atol=0)
    for head in (once, twice):
        head.step(0.1)
    torch.testing.assert_close(twice.centres, once.centres, rtol=1e-12, atol=1e-15)
