"""Several labels a row: every rule against the dense reference, on as many ranks as were launched."""

import pytest
import torch

from partial_fc.comm import CollectiveError, SingleWorld
from partial_fc.head import (
    MLC,
    MLCD,
    ArcFace,
    CosFace,
    CurricularFace,
    HardNegatives,
    MeanSoftmax,
    OwnOut,
    PartialFC,
    SoftTarget,
)
from tests.flat import flat_head, learn
from tests.parallel.head import test_head_kinds as one_label
from tests.parallel.head.test_head_kinds import CLASSES, FILL, PATHS, D, check_against_dense, check_any_number_of_ranks

T = 4
RULES = [MeanSoftmax(), OwnOut(), SoftTarget(), MLC(), MLCD()]
SOME = ("cosface", "arcface", "adaface", "filter", "sub-centres", "corrected", "InsightFace's quota")
KINDS = [kind for kind in one_label.KINDS if str(kind) in SOME]


def batch_of(world, rule, seed: int = 0):
    """(features and labels of all ranks, the part of this one, weights). Labels stand twice or are missing."""
    rows = [5 + rank for rank in range(world.size)]
    generator = torch.Generator().manual_seed(seed)
    feat_GD = torch.randn(sum(rows), D, generator=generator, dtype=torch.float64) * 2 + 1
    label_GT = torch.randint(0, CLASSES, (sum(rows), T), generator=generator)
    label_GT[1, 1:] = label_GT[1, 0]
    label_GT[2, 2] = label_GT[2, 0]
    label_GT[3, 1:] = FILL
    label_GT[4, 0] = FILL
    weight_GT = torch.rand(label_GT.shape, generator=generator, dtype=torch.float64) + 0.1
    weight_GT[0, 1] = 0.0
    part = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
    return feat_GD, label_GT, part, weight_GT if rule.has_weights else None


def cases():
    """In float64 every rule with every kind, sampled and not in turn; else every rule, with the kinds in turn."""
    for j, path in enumerate(PATHS):
        for i, rule in enumerate(RULES):
            for m, kind in enumerate(KINDS):
                if path[1] == torch.float64 or (i + j) % 3 == m % 3:
                    rate = 0.3 if (i + m) % 2 else 1.0
                    yield pytest.param(rule, kind, path, rate, id=f"{rule}-{kind}-{path[0]}-{path[1]}-{rate}")


@pytest.mark.parametrize(("rule", "kind", "path", "sample_rate"), list(cases()))
def test_sharded_equals_dense(world, rule, kind, path, sample_rate):
    impl, dtype, allowed = path
    allowed = min(allowed, 1e-5) if dtype == torch.float32 else 1e-12
    head = flat_head(CLASSES, D, kind.margin, sample_rate, world, 3, dtype=dtype, impl=impl, rule=rule, **kind.options)
    feat_GD, label_GT, part, weight_GT = batch_of(world, rule)
    check_against_dense(world, head, feat_GD, label_GT, part, allowed, weight_GT=weight_GT, **kind.of_reference)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path[0]}-{path[1]}")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sharded_equals_dense_with_hard_negatives(world, rule, path):
    """Those of three steps' lists."""
    impl, dtype, allowed = path
    allowed = min(allowed, 1e-5) if dtype == torch.float32 else 1e-12
    hard = HardNegatives(CLASSES, k=3, every=1)
    options = {"dtype": dtype, "impl": impl, "rule": rule, "hard_negatives": hard}
    head = flat_head(CLASSES, D, CosFace(16.0), 0.2, world, 3, **options)
    feat_GD, label_GT, part, weight_GT = batch_of(world, rule)
    own_BT = weight_GT[part] if rule.has_weights else None
    for _ in range(3):
        learn(head, feat_GD[part].to(dtype).requires_grad_(), label_GT[part], own_BT)
    _, classes = check_against_dense(world, head, feat_GD, label_GT, part, allowed, weight_GT=weight_GT)
    drawn = world.all_gather(head.draw.negatives(3, head.shard, "cpu"), name="t/drawn")
    assert len(classes) > len(torch.cat([drawn, label_GT[label_GT != FILL]]).unique()), "none but drawn ones"


@pytest.mark.parametrize("impl", sorted({impl for impl, dtype, _ in PATHS if dtype == torch.float32}))
def test_one_label_is_the_same_to_the_bit_however_it_is_given(world, impl):
    """Also by the rules that have no other meaning for one label."""
    feat_GD, label_GT, part, _ = batch_of(world, MeanSoftmax())
    label_G = label_GT.amax(dim=1)
    fill_B = torch.full_like(label_G[part], FILL)
    given = [(label_G[part], None), (label_G[part][:, None], torch.rand(len(fill_B), 1) + 0.5)]
    seen = []
    for rule in (None, MeanSoftmax(), OwnOut(), SoftTarget(), MLC()):
        for label, weight in given:
            head = flat_head(CLASSES, D, ArcFace(), 0.3, world, 3, impl=impl, rule=rule)
            feat_BD = feat_GD[part].float().requires_grad_()
            loss = learn(head, feat_BD, label, weight if head.rule.has_weights and label.dim() == 2 else None)
            seen.append((loss, feat_BD.grad, head.centres.clone()))
    for one in seen[1:]:
        assert all(map(torch.equal, one, seen[0]))


@pytest.mark.parametrize("sample_rate", [1.0, 0.2])
def test_the_number_of_ranks_does_not_change_ten_steps(world, sample_rate):
    """With rows that have no label, more labels in some steps than in others, and hard negatives."""

    def batch(world, seed):
        feat_GD, label_GT, part, weight_GT = batch_of(world, OwnOut(), seed)
        label_GT[-1] = FILL
        own = slice(0, T if seed % 3 else 2)
        return feat_GD, label_GT[:, own], part, weight_GT[:, own]

    check_any_number_of_ranks(world, range(10), batch, sample_rate=sample_rate, rule=OwnOut())


def test_micro_batches_are_one_batch_where_their_labels_are_announced(world):
    """Also where they differ in the number of labels."""
    feat_GD, label_GT, part, _ = batch_of(world, MeanSoftmax())
    label_GT[:, 2:] = label_GT[:, :2]
    heads = [flat_head(CLASSES, D, CosFace(16.0), 0.2, world, 3, dtype=torch.float64) for _ in range(2)]
    feat_BD, label_BT = feat_GD[part], label_GT[part]
    (heads[0](feat_BD.clone().requires_grad_(), label_BT)).backward()
    heads[1].prepare(label_BT)
    num_rows = len(label_GT)
    for rows, num_labels in ((slice(0, 3), T), (slice(3, None), 2)):
        share = world.all_reduce(torch.tensor(len(label_BT[rows])), name="t/rows").item() / num_rows
        (heads[1](feat_BD[rows].clone().requires_grad_(), label_BT[rows, :num_labels]) * share).backward()
    grads = [[grad_KD.clone() for *_, grad_KD in head.centre_gradients()] for head in heads]
    torch.testing.assert_close(torch.cat(grads[1]), torch.cat(grads[0]), rtol=1e-12, atol=1e-15)


def test_what_does_not_fit_is_named(world):
    feat_BD, label_BT = torch.randn(4, D), torch.zeros(4, 3, dtype=torch.int64)
    head = PartialFC(101, D, CosFace(), world=world)
    for weight, words in [
        (-torch.ones(4, 3), r"weight -1\.0 of label 0 of row 0 \(12 such\)"),
        (torch.full((4, 3), torch.nan), "weight nan of label 0"),
        (torch.ones(4, 2), r"\(4, 2\).*shape \(4, 3\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            head(feat_BD, label_BT, weight)
    with pytest.raises(ValueError, match="weights with one label"):
        head(feat_BD, label_BT[:, 0], torch.ones(4))
    with pytest.raises(ValueError, match="at least one label"):
        head(feat_BD, label_BT[:, :0])
    with pytest.raises(ValueError, match="MLC gives weights no meaning"):
        flat_head(101, D, CosFace(), world=world, rule=MLC())(feat_BD, label_BT, torch.ones(4, 3))
    with pytest.raises(ValueError, match="several labels a row with CurricularFace"):
        PartialFC(101, D, CurricularFace(), world=world)(feat_BD, label_BT)
    with pytest.raises(ValueError, match="MLCD with CurricularFace"):
        flat_head(101, D, CurricularFace(), world=world, rule=MLCD())


def test_ranks_with_different_numbers_of_labels_are_refused(world):
    if world.size == 1:
        return
    head = PartialFC(101, D, CosFace(), world=world)
    with pytest.raises((CollectiveError, ValueError)):
        head(torch.randn(4, D), torch.zeros(4, 2 + world.rank, dtype=torch.int64))


@pytest.mark.parametrize("impl", sorted({impl for impl, _, _ in PATHS}))
def test_fewer_classes_than_ranks_and_a_rank_without_rows(world, impl):
    """Where every class is a label of the row nothing is left to sum up."""
    label_BT = torch.tensor([[0, 1], [1, FILL]])
    for rule in RULES:
        losses = []
        for ranks in (world, SingleWorld()):
            head = flat_head(2, D, CosFace(16.0), world=ranks, impl=impl, rule=rule)
            has_rows = ranks.rank == ranks.size - 1
            feat_BD = torch.ones(2, D).cumsum(0)[: 2 * has_rows].requires_grad_()
            losses.append(learn(head, feat_BD, label_BT[: 2 * has_rows]).item())
            assert feat_BD.grad.isfinite().all()
            assert head.centres.isfinite().all()
        assert abs(losses[0] - losses[1]) < 1e-5
