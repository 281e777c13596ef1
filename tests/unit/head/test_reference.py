"""The dense reference itself: its slopes against finite differences, its options against their definitions."""

import pytest
import torch

from partial_fc.head.margin import ArcFace, CombinedMargin, CosFace, Softmax
from partial_fc.head.margin_adaptive import AdaFace
from partial_fc.head.margin_curricular import CurricularFace
from tests import head_reference as reference

G, C, D = 6, 11, 5
MARGINS = [
    Softmax(4.0),
    CosFace(8.0),
    ArcFace(8.0),
    CombinedMargin(8.0, 1.2, 0.1, 0.1),
    AdaFace(8.0),
    CurricularFace(8.0),
]
OPTIONS = [
    {},
    pytest.param({"sampled_S": torch.tensor([0, 1, 3, 4, 8, 10])}, marks=pytest.mark.long),
    pytest.param({"filter_above": 0.3}, marks=pytest.mark.long),
    {"filter_above": 0.3, "sampled_S": torch.tensor([0, 1, 3, 8])},
    pytest.param({"sub_centres": 3}, marks=pytest.mark.long),
    {"sub_centres": 2, "sampled_S": torch.tensor([0, 1, 3, 5, 8])},
]


def batch(sub_centres: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    feat_GD = torch.randn(G, D, generator=generator, dtype=torch.float64) * 20
    centre_CD = torch.randn(C * sub_centres, D, generator=generator, dtype=torch.float64)
    return feat_GD, torch.tensor([0, 8, 3, 3, 1, 0]), centre_CD


def advanced(margin, feat_GD, label_G, centre_CD, sub_centres=1):
    target_cos_G = reference.cosines(feat_GD, centre_CD, sub_centres)[torch.arange(len(label_G)), label_G]
    return margin.advance(margin.state(), feat_GD.norm(dim=1), target_cos_G)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "full")
def test_agrees_with_finite_differences(margin, options):
    """The lengths of the features are constants to a margin, so they are held where AdaFace reads them."""
    sub_centres = options.get("sub_centres", 1)
    feat_GD, label_G, centre_CD = batch(sub_centres)
    state = advanced(margin, feat_GD, label_G, centre_CD, sub_centres)
    length_G1 = feat_GD.norm(dim=1, keepdim=True)

    def loss(feat, centres):
        held = reference.unit(feat) * length_G1
        return reference.loss(held, label_G, centres, margin, state=state, **options)

    assert torch.autograd.gradcheck(loss, (feat_GD.requires_grad_(), centre_CD.requires_grad_()), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_sampled_is_the_loss_of_a_smaller_problem(margin):
    feat_GD, label_G, centre_CD = batch()
    sampled_S = torch.tensor([0, 1, 3, 8, 9])
    sampled = reference.loss(feat_GD, label_G, centre_CD, margin, sampled_S)
    small = reference.loss(feat_GD, torch.searchsorted(sampled_S, label_G), centre_CD[sampled_S], margin)
    assert sampled == small
    assert sampled < reference.loss(feat_GD, label_G, centre_CD, margin)


def test_filter_leaves_near_classes_out_and_never_the_own_one():
    feat_GD, label_G, centre_CD = batch()
    for threshold in (-0.2, 0.3, 0.8):
        each = []
        for feat_1D, label in zip(feat_GD.split(1), label_G.split(1), strict=True):
            cos_C = reference.cosines(feat_1D, centre_CD)[0]
            stays_S = ((cos_C <= threshold) | (torch.arange(C) == label)).nonzero().squeeze(1)
            each.append(reference.loss(feat_1D, label, centre_CD, ArcFace(8.0), stays_S))
        together = reference.loss(feat_GD, label_G, centre_CD, ArcFace(8.0), filter_above=threshold)
        torch.testing.assert_close(together, torch.stack(each).mean())
    # With everything filtered, a target class alone has probability 1.
    assert reference.loss(feat_GD, label_G, centre_CD, ArcFace(8.0), filter_above=-1.0) == 0


def test_sub_centres_act_through_the_nearest():
    feat_GD, label_G, centre_CD = batch(sub_centres=3)
    nearest_GC = reference.cosines(feat_GD, centre_CD).unflatten(1, (C, 3)).argmax(dim=2)
    for g in range(G):
        alone_CD = centre_CD.unflatten(0, (C, 3))[torch.arange(C), nearest_GC[g]]
        alone = reference.loss(feat_GD[g : g + 1], label_G[g : g + 1], alone_CD, ArcFace(8.0))
        sub = reference.loss(feat_GD[g : g + 1], label_G[g : g + 1], centre_CD, ArcFace(8.0), sub_centres=3)
        torch.testing.assert_close(sub, alone)


def test_rows_of_length_zero_are_defined():
    feat_GD, label_G, centre_CD = batch()
    feat_GD[1] = 0
    centre_CD[3] = 0
    feat_GD.requires_grad_()
    centre_CD.requires_grad_()
    for margin in MARGINS:
        loss = reference.loss(feat_GD, label_G, centre_CD, margin)
        grads = torch.autograd.grad(loss, (feat_GD, centre_CD))
        assert torch.isfinite(loss)
        assert all(torch.isfinite(grad).all() for grad in grads)
        assert torch.count_nonzero(grads[0][1]) == torch.count_nonzero(grads[1][3]) == 0
