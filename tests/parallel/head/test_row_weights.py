"""Weights of rows: the loss is the mean of weight * loss over the rows of all ranks."""

import pytest
import torch

from partial_fc.head import MLCD, CosFace, CurricularFace, MeanSoftmax, OwnOut, PartialFC
from tests.flat import flat_head
from tests.parallel.head import test_head_kinds as kinds
from tests.parallel.head.test_head_kinds import CLASSES, PATHS, D, Kind, batch_of, check_against_dense

SOME = [
    *(kind for kind in kinds.KINDS if str(kind) in ("cosface", "sub-centres", "curricularface")),
    Kind("3 labels", options={"rule": OwnOut()}),
    Kind("3 labels, sub-centres", options={"rule": MeanSoftmax(), "sub_centres": 2}, of_reference={"sub_centres": 2}),
    Kind("MLCD", options={"rule": MLCD()}),
]


def weights_of(label_G) -> torch.Tensor:
    """With a row that does not count."""
    weight_G = torch.linspace(0.2, 3.0, len(label_G), dtype=torch.float64)
    weight_G[2] = 0.0
    return weight_G


def labels_of(kind: Kind, label_G) -> torch.Tensor:
    return torch.stack([label_G, (label_G + 1) % CLASSES, label_G // 2], dim=1) if "labels" in str(kind) else label_G


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path[0]}-{path[1]}")
@pytest.mark.parametrize("kind", SOME, ids=str)
def test_sharded_equals_dense(world, kind, path):
    impl, dtype, _ = path
    allowed = 1e-12 if dtype == torch.float64 else 1e-5
    head = flat_head(CLASSES, D, kind.margin, 0.4, world, 3, dtype=dtype, impl=impl, **kind.options)
    feat_GD, label_G, part = batch_of(world)
    label_GT, weight_G = labels_of(kind, label_G), weights_of(label_G)
    grad_BD, _ = check_against_dense(
        world, head, feat_GD, label_GT, part, allowed, row_weight_G=weight_G, **kind.of_reference
    )
    assert world.rank or torch.count_nonzero(grad_BD[2]) == 0


@pytest.mark.parametrize("impl", sorted({impl for impl, dtype, _ in PATHS if dtype == torch.float32}))
@pytest.mark.parametrize("num_labels", [1, 3])
def test_weights_of_one_are_none_to_the_bit(world, impl, num_labels):
    seen = []
    for weighed in (False, True):
        head = flat_head(CLASSES, D, CosFace(16.0), 0.3, world, 3, impl=impl)
        feat_GD, label_G, part = batch_of(world)
        label_GT = labels_of(SOME[-2] if num_labels > 1 else SOME[0], label_G)
        weight_B = torch.ones(len(label_G[part])) if weighed else None
        feat_BD = feat_GD[part].float().requires_grad_()
        loss, cosine, nearest = head.loss_and_topk(feat_BD, label_GT[part], 2, row_weight_B=weight_B)
        loss.backward()
        head.step(0.1)
        seen.append((loss.detach(), feat_BD.grad, cosine, nearest, head.centres.clone()))
    assert all(map(torch.equal, *seen))


def test_the_number_of_ranks_does_not_change_it(world):
    """Nor rows without a label, which do not count, or a rank without rows."""

    def batch(world, seed):
        feat_GD, label_G, part = batch_of(world, seed=seed)
        weight_G = weights_of(label_G)
        label_G[-1] = -100
        if seed == 3 and world.size > 1:
            part = slice(0, len(label_G) * (world.rank == 1))
        return feat_GD, label_G, part, None, weight_G.float()

    kinds.check_any_number_of_ranks(world, range(6), batch)


def test_what_does_not_fit_is_named(world):
    head = PartialFC(101, D, CosFace(), world=world)
    feat_BD, label_B = torch.randn(4, D), torch.zeros(4, dtype=torch.int64)
    for weight, words in [
        (torch.tensor([1.0, -0.5, 1.0, -1.0]), r"weight -0\.5 of row 1 \(2 such\)"),
        (torch.tensor([1.0, 1.0, 1.0, torch.nan]), "weight nan of row 3"),
        (torch.ones(3), r"\(3,\); expected floating ones, \(4,\)"),
        (torch.ones(4, dtype=torch.int64), r"torch\.int64"),
    ]:
        with pytest.raises(ValueError, match=words):
            head(feat_BD, label_B, row_weight_B=weight)
    with pytest.raises(TypeError, match="row weights are list"):
        head(feat_BD, label_B, row_weight_B=[1.0] * 4)


def test_averages_of_a_margin_are_over_all_rows_alike(world):
    feat_GD, label_G, part = batch_of(world)
    states = []
    for weight_B in (None, weights_of(label_G)[part]):
        head = flat_head(CLASSES, D, CurricularFace(), world=world, impl="plain")
        head(feat_GD[part].float().requires_grad_(), label_G[part], row_weight_B=weight_B).backward()
        states.append(head.margin_state)
    assert states[0] == states[1]
