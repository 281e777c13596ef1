"""Every kind of head (margin, filter, sub-centres, kernel, centres' dtype) against the dense
reference, sampled and not, on as many ranks as were launched."""

import os
from dataclasses import dataclass, field

import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.head import MLCD, ArcFace, CombinedMargin, CosFace, HardNegatives, PartialFC, Storage
from partial_fc.head.margin_adaptive import AdaFace
from partial_fc.head.margin_curricular import CurricularFace
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD
from tests import head_reference as reference
from tests.flat import flat_head, learn
from tests.labels_reference import loss_of_labels

D, CLASSES, FILL = 24, 101, -100


@dataclass
class Kind:
    name: str
    margin: object = field(default_factory=lambda: CosFace(32.0))
    options: dict = field(default_factory=dict)
    of_reference: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


KINDS = [
    Kind("cosface"),
    Kind("arcface", ArcFace()),
    Kind("arcface, straight through", ArcFace(straight_through=True)),
    Kind("combined", CombinedMargin(32.0, 1.1, 0.2, 0.1)),
    Kind("adaface", AdaFace()),
    Kind("curricularface", CurricularFace()),
    Kind("filter", options={"interclass_filtering_threshold": 0.2}, of_reference={"filter_above": 0.2}),
    Kind("sub-centres", options={"sub_centres": 3}, of_reference={"sub_centres": 3}),
    Kind("InsightFace's quota", options={"quota": "insightface"}),
    Kind(
        "curricularface, filter, sub-centres",
        CurricularFace(32.0),
        {"sub_centres": 2, "interclass_filtering_threshold": 0.3},
        {"sub_centres": 2, "filter_above": 0.3},
    ),
]
# kernel, dtype that is computed in, relative error allowed
PATHS = [("plain", torch.float64, 1e-11), ("plain", torch.float32, 2e-5), ("cpu", torch.float32, 2e-5)]
if os.environ.get("TRITON_INTERPRET") == "1":  # stages of their own in scripts/test.sh
    PATHS = [("triton", torch.float32, 2e-5)]


def batch_of(world, seed: int = 0, rows: list[int] | None = None, num_classes: int = CLASSES):
    """(features and labels of all ranks, the part of this one). rows: of each rank; none: sizes that differ."""
    rows = rows or [5 + rank for rank in range(world.size)]
    generator = torch.Generator().manual_seed(seed)
    # Near to each other, so that cosines are large and filters have something to do; of different lengths.
    feat_GD = torch.randn(sum(rows), D, generator=generator, dtype=torch.float64) * 2 + 1
    label_G = torch.randint(0, num_classes, (sum(rows),), generator=generator)
    return feat_GD, label_G, slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))


def gathered(world, head):
    """(all centres, the local rows that took part, their gradient, the classes that took part on all ranks)."""
    k = head.sub_centres
    centre = world.all_gather(head.centres.flatten(1), name="t/centres")
    parts = [(rows, grad_KD.clone()) for rows, _, _, grad_KD in head.centre_gradients()]
    grad_SD = torch.cat([grad for _, grad in parts]) if parts else torch.zeros(0, D, dtype=head.dtype)
    rows = parts[0][0] if parts else torch.zeros(0, dtype=torch.int64)
    rows = torch.arange(len(head.shard) * k) if rows is None else rows
    classes = world.all_gather(rows[::k] // k + head.shard.start, name="t/sampled")
    return centre.double().view(-1, D), rows, grad_SD, classes


def relative_error(ours, exact) -> float:
    return ((ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-3)).item() if len(exact) else 0.0


def check_against_dense(
    world, head, feat_GD, label_G, part, allowed, *, weight_GT=None, row_weight_G=None, **of_reference
):
    """Loss, gradients and each row's loss of a step. label_G: or label_GT, of which some are FILL, with their weights.
    Returns the gradient of this rank's features, and the classes that took part."""
    feat_BD = feat_GD[part].to(head.dtype).requires_grad_()
    own_BT, own_B = (None if weights is None else weights[part] for weights in (weight_GT, row_weight_G))
    loss = head(feat_BD, label_G[part], own_BT, row_weight_B=own_B)
    loss.backward()

    centre_RD, rows, grad_SD, classes = gathered(world, head)
    centre_RD.requires_grad_()
    dense_GD = feat_GD.clone().requires_grad_()
    more = {**of_reference, "state": head.margin_state, "row_weight_G": row_weight_G}
    if label_G.dim() == 1 and not isinstance(head.rule, MLCD):
        cos_GC = reference.cosines(feat_GD, centre_RD.detach(), head.sub_centres)
        cos_G = cos_GC[torch.arange(len(label_G)), label_G]
        more["state"] = head.margin.advance(head.margin.state(), feat_GD.norm(dim=1), cos_G)
        exact = reference.loss(dense_GD, label_G, centre_RD, head.margin, classes, **more)
    else:
        label_GT = label_G.view(len(label_G), -1)
        real_GT = (label_GT != FILL).double()
        weight_GT = real_GT if weight_GT is None else weight_GT * real_GT
        label_GT = label_GT.where(label_GT != FILL, label_GT.amax(dim=1, keepdim=True))
        exact = loss_of_labels(dense_GD, label_GT, weight_GT, centre_RD, head.margin, head.rule, classes, **more)
    exact.backward()
    assert abs(loss.item() - exact.item()) < allowed * max(1.0, abs(exact.item()))
    if world.size == 1:
        assert head.row_losses(head.last_step, len(feat_GD)).mean().item() == pytest.approx(loss.item())
    assert relative_error(feat_BD.grad, dense_GD.grad[part]) < allowed
    assert relative_error(grad_SD, centre_RD.grad[rows + head.shard.start * head.sub_centres]) < allowed
    return feat_BD.grad, classes


def pairwise():
    """Every kind on every path, in float64 sampled and not, else one of the two in turn."""
    for i, kind in enumerate(KINDS):
        for j, path in enumerate(PATHS):
            rates = (1.0, 0.3) if path[1] == torch.float64 else ((1.0, 0.3)[(i + j) % 2],)
            for sample_rate in rates:
                yield pytest.param(kind, path, sample_rate, id=f"{kind}-{path[0]}-{path[1]}-{sample_rate}")


@pytest.mark.parametrize(("kind", "path", "sample_rate"), list(pairwise()))
def test_sharded_equals_dense(world, kind, path, sample_rate):
    impl, dtype, allowed = path
    head = flat_head(CLASSES, D, kind.margin, sample_rate, world, 3, dtype=dtype, impl=impl, **kind.options)
    check_against_dense(world, head, *batch_of(world), allowed, **kind.of_reference)


def train(head: PartialFC, world, steps: range, batch=batch_of) -> torch.Tensor:
    """The losses of steps with changing batches, rates that rise and fall, and one step whose gradient is zero. batch:
    features, labels, the part of this rank, and what else the head is given; a head of SingleWorld gets all of it."""
    losses = []
    for step in steps:
        feat_GD, label_G, part, *more = batch(world, seed=step)
        own = part if head.world is world else slice(None)
        weights = (None if weight_G is None else weight_G[own] for weight_G in more)
        loss = head(feat_GD[own].to(head.dtype).requires_grad_(), label_G[own], *weights)
        loss.backward()
        if step == 5:
            head.scale_gradient(0.0)
        head.step(0.05 * (1 + step % 3))
        losses.append(loss.detach())
    return torch.stack(losses)


def check_any_number_of_ranks(world, steps: range, batch=batch_of, margin=None, sample_rate=0.3, **options) -> None:
    """W ranks against one, to rounding in float64: losses, centres and state."""
    sharded, alone = (
        flat_head(CLASSES, D, margin or CosFace(16.0), sample_rate, of, 7, dtype=torch.float64, **options)
        for of in (world, SingleWorld())
    )
    losses = (train(head, world, steps, batch) for head in (sharded, alone))
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    for name, mine in sharded.row_state().items():
        every = world.all_gather(mine, name="t/rows")
        torch.testing.assert_close(every, alone.row_state()[name], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["plain", "cpu"])
def test_the_number_of_ranks_does_not_change_ten_steps(world, impl, dtype, sample_rate):
    """W ranks against one, stored in any dtype: negatives and rounding noise do not depend on W either."""
    options = {"seed": 7, "impl": impl, "storage": Storage(dtype)}
    sharded = flat_head(CLASSES, D, CosFace(16.0), sample_rate, world, **options)
    alone = flat_head(CLASSES, D, CosFace(16.0), sample_rate, SingleWorld(), **options)
    losses = (train(head, world, range(10)) for head in (sharded, alone))
    # One sum in another order may round a stored number the other way: one unit in its last place.
    torch.testing.assert_close(*losses, rtol=0, atol={torch.float32: 1e-5}.get(dtype, 1e-3))
    centre_CD = world.all_gather(sharded.centres, name="t/centres").float()
    same = centre_CD == alone.centres.float()
    torch.testing.assert_close(centre_CD, alone.centres.float(), rtol=2e-2, atol=1e-4)
    assert dtype == torch.float32 or same.float().mean() > 0.97


OPTIMIZERS = [
    RowSGD(0.9, 0.01),
    RowSGD(0.9, 0.01, nesterov=True),
    RowAdamW(weight_decay=0.1),
    RowAdagrad(weight_decay=0.1),
]


@pytest.mark.parametrize("catch_up", ["none", "exact"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "nesterov", "adamw", "adagrad"])
def test_every_optimizer_sharded_is_the_unsharded_one(world, optimizer, catch_up):
    check_any_number_of_ranks(world, range(12), optimizer=optimizer, catch_up=catch_up)


def test_hard_negatives_take_part(world):
    """A centre that lies beside a class of the batch is found, and from then on takes part with it."""
    near, own = 90, 7
    head = flat_head(CLASSES, D, CosFace(16.0), 0.2, world, hard_negatives=HardNegatives(CLASSES, k=2, every=1), seed=1)
    feat_GD, _, _ = batch_of(world)
    table = head.store.all_rows()
    if head.shard.start <= near < head.shard.stop:
        table[near - head.shard.start] = feat_GD[0]
    label_G = torch.full((len(feat_GD),), own)
    took_part = []
    for _ in range(12):
        rows = head.active_rows(label_G).rows
        here = rows + head.shard.start
        took_part.append(bool(world.all_reduce((here == near).sum().float(), name="t/near").item()))
        learn(head, feat_GD[:1].float().expand(2, -1).clone().requires_grad_(), label_G[:2], lr=0.0)
    first = took_part.index(True)
    assert first < 6
    assert all(took_part[first:])
