"""What callers of the library do with the head and our own loop does not: other modes, dtypes and orders of calls."""

import pytest
import torch

from partial_fc.head import AdaFace, CosFace, CurricularFace, HardNegatives, PartialFC, RowSGD
from partial_fc.head.kernels import LogitGrad, Logits
from partial_fc.head.kernels.cpu import CpuKernel
from partial_fc.head.kernels.plain import PlainKernel
from partial_fc.head.margin import Negatives
from tests.flat import flat_head, learn
from tests.unit.thread_world import in_world

D = 16


def batch(num_rows: int = 8, num_classes: int = 200, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    feat = torch.randn(num_rows, D, generator=generator)
    return feat.requires_grad_(), torch.randint(num_classes, (num_rows,), generator=generator)


@pytest.mark.parametrize("impl", ["plain", "cpu"])
def test_backwards_with_rules_of_their_own_are_added_up(impl):
    """CurricularFace has a threshold for each feature, and its t moves with every forward."""
    head = flat_head(200, D, CurricularFace(32.0, momentum=0.0), impl=impl, optimizer=RowSGD(0.0, 0.0))
    for seed in range(2):
        head(*batch(seed=seed)).backward()
    found = [PlainKernel().centre_gradients(part.logits, part.logit_grad) for part in head.pending]
    parts = [torch.cat([grad.clone() for _, _, grad in chunks]) for chunks in found]
    before = head.centres.clone()
    head.step(0.1)
    torch.testing.assert_close(head.centres - before, -0.1 * sum(parts), rtol=1e-3, atol=1e-7)


def test_a_second_backward_wants_retain_graph_and_a_second_derivative_is_refused():
    head = PartialFC(200, D, CosFace(32.0))
    feat_BD, label_B = batch()
    loss = head(feat_BD, label_B)
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(head.pending) == 2
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()
    assert len(head.pending) == 2
    head.discard()
    (grad_BD,) = torch.autograd.grad(head(feat_BD, label_B).square(), feat_BD, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_BD.sum().backward()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("target", {"target_G": torch.zeros(3, dtype=torch.int64)}),
        ("target", {"target_G": torch.zeros(6, dtype=torch.int32)}),
        ("target 9", {"target_G": torch.full((6,), 9)}),
        ("unit", {"unit_GD": torch.zeros(6, 4, dtype=torch.float64)}),
        ("rows 0 to 9", {"row_S": torch.tensor([0, 9]), "target_G": torch.zeros(6, dtype=torch.int64)}),
        ("centres", {"centre_LD": torch.zeros(9, 5)}),
    ],
)
def test_the_cpp_kernel_reads_no_memory_that_is_not_there(name, change):
    fits = {"unit_GD": torch.zeros(6, 4), "centre_LD": torch.zeros(9, 4), "row_S": None, "scale": 8.0}
    fits |= {"target_G": torch.zeros(6, dtype=torch.int64), "negatives": Negatives()}
    kernel = CpuKernel("fp32")
    kernel.sums(Logits(**fits))
    with pytest.raises(ValueError, match=name):
        kernel.sums(Logits(**{**fits, **change}))
    with pytest.raises(ValueError, match="factor"):
        list(kernel.centre_gradients(Logits(**fits), LogitGrad(torch.zeros(5, dtype=torch.float64), torch.zeros(6))))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("margin", [AdaFace(), CurricularFace()], ids=lambda m: type(m).__name__)
def test_evaluation_gives_the_loss_and_learns_nothing(margin, mode):
    head = flat_head(200, D, margin, 0.2, hard_negatives=HardNegatives(200, k=2, every=1))
    feat, label = batch()
    with head.world.count_traffic() as traffic, mode():
        # A tensor of inference mode, and one that requires a gradient.
        losses = [head(feat * 1.0, label).item(), head(feat, label).item()]
    assert head.margin_state == margin.state()
    assert not head.pending
    assert "head/features" not in traffic.calls
    assert bool((head.hard_negatives.state()["owner"] == -1).all())
    head.margin_state = margin.advance(margin.state(), feat.detach().norm(dim=1), torch.zeros(8))
    assert losses[0] == losses[1]
    head.margin_state = margin.state()
    assert head.eval()(feat, label).item() == losses[0]


@pytest.mark.parametrize("impl", ["plain", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_too_long_for_float32_are_not_zeros(impl, dtype):
    """As zeros they would have gradient 0 and a finite loss: the guards would see nothing."""
    head = flat_head(200, D, CosFace(), impl=impl)
    feat, label = batch()
    feat.data[3] = 4.5e19
    loss = head(feat.to(dtype), label)
    loss.backward()
    assert loss.isnan()
    assert not head.finite()


def test_a_label_that_was_not_prepared_is_named():
    head = PartialFC(200, D, CosFace(), 0.1)
    feat, _ = batch(2)
    head.prepare(torch.tensor([7, 9]))
    with pytest.raises(ValueError, match=r"class 8, row 1 .*prepare"):
        head(feat, torch.tensor([7, 8]))
    head.step(0.1)
    head(feat, torch.tensor([7, 8]))


def test_labels_are_integers_of_any_width():
    feat, label = batch(num_classes=100)
    head = PartialFC(200, D, CosFace(), 0.1)
    exact = head(feat, label).item()
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert head(feat, label.to(dtype)).item() == exact
    for dtype in (torch.float64, torch.bool):
        with pytest.raises(ValueError, match=rf"{dtype}.*int64"):
            head(feat, label.to(dtype))


@pytest.mark.parametrize("impl", ["plain", "cpu"])
def test_autocast_does_not_reach_into_the_head(impl):
    results = []
    for enabled in (False, True):
        head = flat_head(200, D, CosFace(), impl=impl)
        feat, label = batch()
        with torch.autocast("cpu", enabled=enabled):
            loss = learn(head, feat, label)
        results.append((loss, feat.grad, head.centres.clone()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_the_default_dtype_does_not_reach_into_the_head():
    feat, label = batch()
    wanted = PartialFC(200, D, CosFace())(feat, label).item()
    torch.set_default_dtype(torch.float64)
    try:
        head = PartialFC(200, D, CosFace())
        loss = learn(head, feat, label)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.item() == wanted


def test_many_sub_centres_and_a_large_batch():
    """Chunks are whole classes, also where one has more centres than a chunk should have rows."""
    head = flat_head(3, 2, CosFace(), sub_centres=70, impl="plain")
    assert head(torch.ones(17_000, 2), torch.zeros(17_000, dtype=torch.int64)).isfinite()


def test_state_of_another_width_or_selection_is_refused():
    state = PartialFC(200, D, CosFace()).state_dict()
    with pytest.raises(RuntimeError, match="embedding_size 16, this head 8"):
        PartialFC(200, 8, CosFace()).load_state_dict(state)
    with pytest.raises(RuntimeError, match="hard negatives"):
        flat_head(200, D, CosFace(), 0.1, hard_negatives=HardNegatives(200, k=2)).load_state_dict(state)


def test_catch_up_goes_on_where_a_rank_has_no_active_row():
    """More ranks than classes, and a sample of less than a row."""

    def train(world):
        for classes, rate in ((2, 0.5), (40, 0.02)):
            head = flat_head(classes, 4, CosFace(8.0), rate, world, impl="plain", catch_up="exact")
            for step in range(3):
                feat_BD = torch.randn(2, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
                learn(head, feat_BD, torch.tensor([0, 1]))
        return head.num_steps

    assert in_world(3, train) == [3, 3, 3]
