"""The head in one process: its defined corners. (Beside the dense one: tests/parallel/head/test_head.py.)"""

import sys

import pytest
import torch

from partial_fc.head import ArcFace, CosFace, PartialFC, Softmax, Storage
from partial_fc.head.rows import RowAdamW
from tests import head_reference as reference
from tests.flat import flat_head, learn

D = 16


def test_a_zero_feature_and_a_zero_centre_are_defined():
    head = PartialFC(5, D, ArcFace())
    head.store.all_rows()[2] = 0
    feat = torch.randn(4, D)
    feat[1] = 0
    feat.requires_grad_()
    loss = head(feat, torch.tensor([0, 1, 2, 3]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(feat.grad).all()
    assert torch.count_nonzero(feat.grad[1]) == 0
    ((_, _, _, grad),) = head.centre_gradients()
    assert torch.isfinite(grad).all()
    assert torch.count_nonzero(grad[2]) == 0


@pytest.mark.parametrize("scale", [1e-3, 64.0, 300.0])
def test_extreme_logits_stay_exact(scale):
    """Features that point exactly at, and exactly away from, centres: the loss spans 2 * scale."""
    head = PartialFC(3, D, Softmax(scale))
    feat = torch.cat((head.centres[:1], -head.centres[:1])).clone()
    label = torch.zeros(2, dtype=torch.int64)
    exact = reference.loss(feat.double(), label, head.centres.double(), head.margin)
    assert abs(head(feat, label).item() - exact.item()) < 1e-5 * max(1.0, exact.item())


def test_a_scale_that_would_overflow_is_refused():
    with pytest.raises(ValueError, match="choose a smaller scale"):
        PartialFC(3, D, CosFace(scale=1000.0))


def test_only_rows_that_took_part_move_in_memory():
    """Of the others `centres` are what weight decay makes of them."""
    head = PartialFC(10_000, D, CosFace(), sample_rate=0.01)
    before = head.store.all_rows().clone()
    label = torch.tensor([5, 77, 9_999])
    learn(head, torch.randn(3, D, requires_grad=True), label)
    moved = (head.store.centre_LD != before).any(dim=1)
    assert bool((head.centres != before).any(dim=1).all())
    took_part = set(head.draw.negatives(0, head.shard).tolist()) | set(label.tolist())
    assert set(moved.nonzero().flatten().tolist()) == took_part
    assert 90 < len(took_part) < 110
    assert torch.count_nonzero(head.row_state()["momentum"][~moved]) == 0


def test_shapes_that_do_not_fit_are_named():
    head = PartialFC(5, D, CosFace())
    with pytest.raises(ValueError, match=r"\(2, 8\) with labels \(2,\); expected .*as \(B, 16\)"):
        head(torch.randn(2, 8), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="global batch is empty"):
        head(torch.randn(0, D), torch.zeros(0, dtype=torch.int64))


def test_a_kernel_that_is_not_there_is_refused_with_a_remedy(monkeypatch):
    with pytest.raises(ValueError, match=r"'triton' with centres on cpu.*use 'cpu' or 'plain'"):
        flat_head(10, 4, CosFace(), impl="triton")
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    with pytest.raises(ValueError, match="pip install triton"):
        flat_head(10, 4, CosFace(), impl="triton")


def test_adamw_is_refused_where_its_state_cannot_hold_squares():
    with pytest.raises(ValueError, match=r"AdamW's state in float16.*bfloat16 or float32"):
        PartialFC(9, D, CosFace(), optimizer=RowAdamW(), storage=Storage(torch.float16))
    PartialFC(9, D, CosFace(), optimizer=RowAdamW(), storage=Storage(torch.float16, torch.bfloat16))


def test_classes_that_a_checkpoint_lacks_are_as_never_made():
    head = PartialFC(9, D, CosFace(), seed=3)
    start = head.centres.clone()
    learn(head, torch.ones(3, D, requires_grad=True), torch.tensor([1, 7, 8]))
    rows = {name: tensor[[2, 5]].clone() for name, tensor in head.row_state().items()}
    head.rows.write(1, 8, torch.tensor([2, 5]), rows)
    kept, fresh = [0, 2, 5, 8], [1, 3, 4, 6, 7]
    created = head.rows.created(head.rows.start, head.rows.stop)
    assert created.nonzero().flatten().tolist() == kept
    assert torch.equal(head.centres[fresh], start[fresh])
    assert not head.row_state()["momentum"][fresh].any()
    assert bool((head.centres[kept] != start[kept]).any(dim=1).all())
