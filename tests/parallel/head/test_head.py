"""The sharded head's corners against the dense reference, on as many ranks as were launched. (test_head_kinds.py has
all kinds of heads.)"""

import pytest
import torch

from partial_fc.head import ArcFace, CosFace, PartialFC
from tests import head_reference as reference
from tests.parallel.head.test_head_kinds import D, batch_of, check_against_dense, relative_error


def check(world, head, rows, label_G=None):
    feat_GD, drawn_G, part = batch_of(world, rows=rows, num_classes=head.num_classes)
    check_against_dense(world, head, feat_GD, drawn_G if label_G is None else label_G, part, 1e-5)


@pytest.mark.parametrize(
    ("num_classes", "sample_rate", "rows", "labels"),
    [
        (53, 1.0, lambda rank: 5 + 3 * rank, None),  # ragged batches
        (53, 0.2, lambda rank: 5 + 3 * rank, None),
        (53, 1.0, lambda rank: 4 if rank else 0, None),  # an empty one
        (53, 0.2, lambda rank: 4 if rank else 0, None),
        (40, 0.1, lambda rank: 6, lambda num_rows: torch.zeros(num_rows, dtype=torch.int64)),  # ranks without positives
        (90, 0.01, lambda rank: 30, lambda num_rows: torch.arange(num_rows) % 90),  # more than the sample has places
        (1, 1.0, lambda rank: 3, None),  # fewer classes than ranks
        (2, 1.0, lambda rank: 3, None),
    ],
)
def test_corners(world, num_classes, sample_rate, rows, labels):
    sizes = [rows(rank) for rank in range(world.size)] if world.size > 1 else [5]
    head = PartialFC(num_classes, D, CosFace(), sample_rate, world)
    check(world, head, sizes, label_G=None if labels is None else labels(sum(sizes)))


def test_chunks_do_not_change_the_result(world, monkeypatch):
    monkeypatch.setattr("partial_fc.head.kernels.plain.CHUNK_LOGITS", 64)
    for sample_rate in (1.0, 0.5):
        head = PartialFC(301 * world.size, D, ArcFace(), sample_rate, world)
        check(world, head, [5] * world.size)


@pytest.mark.parametrize("bad", [-1, 101, 10**12])
def test_label_out_of_range_names_rank_index_and_label_on_every_rank(world, bad):
    head = PartialFC(101, D, CosFace(), 1.0, world)
    label_B = torch.zeros(4, dtype=torch.int64)
    if world.rank == world.size - 1:
        label_B[2] = bad
    with pytest.raises(ValueError, match=rf"label {bad} at index 2 of rank {world.size - 1}'s batch .* \[0, 101\)"):
        head(torch.randn(4, D), label_B)


@pytest.mark.parametrize(("num_labels", "weighed"), [(1, False), (3, False), (1, True)])
def test_three_collectives_a_step_of_the_stated_size(world, num_labels, weighed):
    head = PartialFC(101, D, CosFace(), 0.5, world)
    feat_BD, label_BK = torch.randn(6, D, requires_grad=True), torch.arange(6 * num_labels).view(6, -1).squeeze(1)
    with world.count_traffic() as traffic:
        head(feat_BD, label_BK, row_weight_B=torch.ones(6) if weighed else None).backward()
        head.step(0.1)
    num_global = 6 * world.size
    assert traffic.calls == {"head/gather": 1, "head/softmax": 1, "head/features": 1}
    assert traffic.num_bytes == {
        "head/gather": 6 * (4 * D + (12 if num_labels == 1 else 16 * num_labels + 4) + 8 * weighed),
        "head/softmax": 8 * (1 + num_labels) * num_global,
        "head/features": 4 * num_global * D,
    }


def test_half_precision_features_keep_their_dtype_and_error_is_theirs(world):
    head = PartialFC(101, D, CosFace(), 1.0, world)
    feat_GD, label_G, part = batch_of(world, rows=[6] * world.size)
    for dtype in (torch.bfloat16, torch.float16):
        feat_BD = feat_GD[part].to(dtype).requires_grad_()
        loss = head(feat_BD, label_G[part])
        loss.backward()
        exact = reference.loss(
            feat_GD.to(dtype).double(), label_G, world.all_gather(head.centres, name="t/centres").double(), head.margin
        )
        assert feat_BD.grad.dtype == dtype
        assert abs(loss.item() - exact.item()) < 1e-5  # rounding the input is the only error


def test_gradient_norm_for_clipping_is_that_of_the_dense_head(world):
    """Every class counts once, wherever it lives; the number is equal on all ranks."""
    feat_GD, label_G, part = batch_of(world)
    head = PartialFC(101, D, CosFace(), 1.0, world)
    head(feat_GD[part].float().requires_grad_(), label_G[part]).backward()
    centre_CD = world.all_gather(head.centres, name="t/centres").double().requires_grad_()
    reference.loss(feat_GD, label_G, centre_CD, head.margin).backward()
    norm = head.gradient_square_sum().sqrt()
    assert relative_error(norm, centre_CD.grad.norm()[None]) < 1e-5
    assert world.all_gather(norm[None], name="t/norm").unique().numel() == 1
