"""Several micro-batches that make one step do what one batch of all of them does, and a step that is not made leaves
nothing behind."""

import pytest
import torch

from partial_fc.head import AdaFace, CosFace, PartialFC
from partial_fc.head.margin import ArcFace
from partial_fc.head.rows import RowAdamW, RowSGD
from tests.flat import flat_head

D, CLASSES, MICRO_BATCHES = 24, 101, 4
KINDS = {
    "all classes": {},
    "sampled": {"sample_rate": 0.2},
    "InsightFace's quota": {"sample_rate": 0.5, "quota": "insightface"},
    "sub-centres, filter": {"sub_centres": 2, "interclass_filtering_threshold": 0.2, "sample_rate": 0.2},
    "catching up": {"sample_rate": 0.2, "catch_up": "exact", "optimizer": RowSGD(0.9, 0.01)},
    "AdamW": {"optimizer": RowAdamW(), "sample_rate": 0.2},
    "weights of rows": {"sample_rate": 0.2},
}


def micro_batches(world, step: int):
    """This rank's; their sizes differ between ranks and are equal from one to the next."""
    size = 3 + world.rank
    generator = torch.Generator().manual_seed(1000 * step + world.rank)
    feat = torch.randn(MICRO_BATCHES, size, D, generator=generator, dtype=torch.float64)
    return feat, torch.randint(0, CLASSES, (MICRO_BATCHES, size), generator=generator)


def one_step(head, feat, label, together: bool, weighed: bool = False):
    """(mean loss, gradient of all features)."""
    weight = torch.linspace(0.0, 3.0, label.numel()).view(label.shape) if weighed else [None] * len(label)
    feat = feat.to(head.dtype).clone().requires_grad_()
    if together:
        # In the order in which the micro-batches put the rows of one rank.
        loss = head(feat.flatten(0, 1), label.flatten(), row_weight_B=weight.flatten() if weighed else None)
        loss.backward()
        return loss.item(), feat.grad
    head.prepare(label.flatten())
    total = 0.0
    for feat_BD, label_B, weight_B in zip(feat, label, weight, strict=True):
        loss = head(feat_BD, label_B, row_weight_B=weight_B) / len(feat)
        loss.backward()
        total += loss.item()
    return total, feat.grad


@pytest.mark.parametrize("impl", ["plain", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_equal_one_batch(world, kind, impl):
    dtype, allowed = (torch.float64, 1e-10) if impl == "plain" else (torch.float32, 2e-5)
    one, many = (
        flat_head(CLASSES, D, ArcFace(32.0), world=world, seed=5, dtype=dtype, impl=impl, **KINDS[kind])
        for _ in range(2)
    )
    for step in range(3):
        feat, label = micro_batches(world, step)
        want, want_grad = one_step(one, feat, label, True, "weights" in kind)
        loss, grad = one_step(many, feat, label, False, "weights" in kind)
        assert loss == pytest.approx(want, rel=allowed)
        assert (grad - want_grad).abs().max() < allowed * want_grad.abs().max()
        norm, want_norm = many.gradient_square_sum(), one.gradient_square_sum()
        torch.testing.assert_close(norm, want_norm, rtol=10 * allowed, atol=0)
        one.step(0.1)
        many.step(0.1)
    # AdamW divides by the root of tiny second moments: rounding of the gradient is magnified.
    torch.testing.assert_close(many.centres, one.centres, rtol=0, atol=100 * allowed)


def test_micro_batches_cost_one_collective_more(world):
    head = PartialFC(CLASSES, D, CosFace(), 0.2, world)
    feat, label = micro_batches(world, 0)
    with world.count_traffic() as traffic:
        one_step(head, feat, label, together=False)
        head.step(0.1)
    assert traffic.calls == {
        "head/labels": 1,
        **dict.fromkeys(("head/gather", "head/softmax", "head/features"), MICRO_BATCHES),
    }
    assert traffic.num_bytes["head/labels"] == 12 * label.numel()


def test_a_bad_label_is_named_before_any_micro_batch(world):
    head = PartialFC(CLASSES, D, CosFace(), world=world)
    label = torch.tensor([1, CLASSES + world.rank])
    with pytest.raises(ValueError, match=rf"label {CLASSES} at index 1 of rank 0's batch is outside"):
        head.prepare(label)


@pytest.mark.parametrize("margin", [CosFace(), AdaFace()], ids=["cosface", "adaface"])
def test_a_discarded_step_leaves_nothing_behind(world, margin):
    """As if its batch had never been: the next step draws the same negatives and does the same."""
    plain, disturbed = (PartialFC(CLASSES, D, margin, 0.2, world, seed=2) for _ in range(2))
    for step in range(3):
        feat, label = micro_batches(world, step)
        if step == 1:
            other = feat * torch.nan if world.rank == 0 else feat
            one_step(disturbed, other, label.flip(0), together=True)
            disturbed.discard()
        for head in (plain, disturbed):
            one_step(head, feat, label, together=True)
            head.step(0.1)
    assert torch.equal(plain.centres, disturbed.centres)
    assert plain.facts() == disturbed.facts()
