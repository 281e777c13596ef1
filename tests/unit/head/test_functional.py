"""The loss as a function, beside the dense reference and the module."""

import pytest
import torch

from partial_fc import linear_partial_cross_entropy
from partial_fc.head import AdaFace, ArcFace, CombinedMargin, CosFace, CurricularFace
from tests import head_reference as reference

C, D = 61, 13
KINDS = [
    (CosFace(16.0), 1, {}, {}),
    (CosFace(16.0), 3, {}, {}),
    (ArcFace(16.0), 1, {}, {}),
    (CombinedMargin(8.0, 1.1, 0.2, 0.1), 2, {"interclass_filtering_threshold": 0.2}, {"filter_above": 0.2}),
]


def batch(dtype: torch.dtype = torch.float64, sub_centres: int = 1):
    random = torch.Generator().manual_seed(1)
    feat_BD = torch.randn(9, D, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    shape = (C, D) if sub_centres == 1 else (C, sub_centres, D)
    centre_CD = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    return feat_BD, centre_CD, torch.tensor([3, 3, 0, 60, 17, 5, 8, 44, 9])


def dense(centre: torch.Tensor) -> torch.Tensor:
    return centre.to_dense() if centre.is_sparse else centre


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
@pytest.mark.parametrize(("margin", "sub_centres", "options", "of_reference"), KINDS, ids=lambda each: f"{each}"[:24])
@pytest.mark.parametrize(("impl", "dtype", "error"), [("plain", torch.float64, 1e-12), ("cpu", torch.float32, 2e-5)])
def test_loss_and_gradients_are_those_of_the_reference(
    margin, options, of_reference, impl, dtype, error, sub_centres, sample_rate, sparse
):
    feat_BD, centre_CD, label_B = batch(dtype, sub_centres)
    options = {**options, "sample_rate": sample_rate, "generator": torch.Generator().manual_seed(5)}
    loss = linear_partial_cross_entropy(feat_BD, centre_CD, label_B, margin, sparse=sparse, impl=impl, **options)
    (3 * loss).backward()
    assert centre_CD.grad.is_sparse == sparse
    touched_C = dense(centre_CD.grad).flatten(1).any(dim=1)
    class_S = centre_CD.grad.coalesce().indices()[0] if sparse else touched_C.nonzero().squeeze(1)
    if sample_rate < 1:
        assert len(label_B.unique()) < len(class_S) < C
    elif sparse:
        assert class_S.tolist() == list(range(C))
    else:
        class_S = torch.arange(C)

    feats, centres, _ = batch(torch.float64, sub_centres)
    expected = reference.loss(
        feats, label_B, centres.reshape(-1, D), margin, class_S, sub_centres=sub_centres, **of_reference
    )
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=error, atol=error)
    for found, wanted in ((feat_BD.grad, feats.grad), (dense(centre_CD.grad), centres.grad)):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=error * wanted.abs().max().item())


def test_the_draw_is_the_generators():
    feat_BD, centre_CD, label_B = batch()

    def loss(generator=None):
        return linear_partial_cross_entropy(
            feat_BD, centre_CD, label_B, "cosface", sample_rate=0.2, generator=generator
        ).item()

    first, second = (loss(torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert first != second
    assert first == loss(torch.Generator().manual_seed(1))
    torch.manual_seed(7)
    third = loss()
    torch.manual_seed(7)
    assert loss() == third != loss()


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_gradients_have_the_dtypes_of_what_they_belong_to(dtypes):
    feat_BD, centre_CD = batch(dtypes[0])[0], batch(dtypes[1])[1]
    label_BT = torch.tensor([[3, -100, 0], [60, 17, -100], [8, 44, 9]])
    loss = linear_partial_cross_entropy(feat_BD.view(3, 3, D), centre_CD, label_BT, "arcface")
    assert loss.dtype == torch.float32
    loss.backward()
    assert (feat_BD.grad.dtype, centre_CD.grad.dtype) == dtypes
    assert bool((feat_BD.grad[[1, 5]] == 0).all())
    assert bool(feat_BD.grad[[0, 2, 3]].any(dim=1).all())


def test_centres_that_change_before_the_backward_are_refused():
    feat_BD, centre_CD, label_B = batch()
    loss = linear_partial_cross_entropy(feat_BD, centre_CD, label_B, "softmax")
    with torch.no_grad():
        centre_CD.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"label": torch.tensor([3, 61] + [0] * 7)}, "label 61"),
        ({"label": torch.full((9,), -100)}, "label"),
        ({"label": torch.zeros(9)}, "labels are torch.float32"),
        ({"label": torch.zeros(8, dtype=torch.int64)}, r"\(8,\)"),
        ({"centre": torch.zeros(C)}, r"\(61,\)"),
        ({"centre": torch.zeros(C, D, dtype=torch.int64)}, "int64"),
        ({"centre": torch.zeros(C, D + 1)}, r"\(9, 13\)"),
        ({"margin": "cosine"}, "cosine"),
        ({"margin": AdaFace()}, "AdaFace"),
        ({"margin": CurricularFace()}, "CurricularFace"),
        ({"sample_rate": 0.0}, "sample_rate is 0.0"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change, word):
    feat_BD, centre_CD, label_B = batch()
    given = {"centre": centre_CD, "label": label_B, "margin": "cosface"} | change
    positional = [given.pop(name) for name in ("centre", "label", "margin")]
    with pytest.raises(ValueError, match=word):
        linear_partial_cross_entropy(feat_BD, *positional, **given)
