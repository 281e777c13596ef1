"""The head without rows: torch's cross-entropy of the whole batch, on any number of ranks."""

import pytest
import torch
import torch.nn.functional as F

from partial_fc.head import CrossEntropy

C = 11


def rows_of(world, kind: str) -> list[int]:
    """Of each rank."""
    sizes = {"equal": [4] * world.size, "ragged": [3 + 2 * rank for rank in range(world.size)]}
    return sizes.get(kind) or [5, *[0] * (world.size - 1)]


@pytest.mark.parametrize("kind", ["equal", "ragged", "all on one rank"])
def test_equals_the_dense_loss_and_its_gradient(world, kind):
    rows = rows_of(world, kind)
    mine = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
    generator = torch.Generator().manual_seed(0)
    logit_GC = (20 * torch.randn(sum(rows), C, generator=generator, dtype=torch.float64)).requires_grad_()
    label_G = torch.randint(0, C, (sum(rows),), generator=generator)
    dense = F.cross_entropy(logit_GC, label_G)
    (0.3 * dense).backward()

    head = CrossEntropy(C, world, torch.float64)
    logit_BC = logit_GC.detach()[mine].clone().requires_grad_()
    with world.count_traffic() as traffic:
        loss = head(logit_BC, label_G[mine])
        (0.3 * loss).backward()
    torch.testing.assert_close(loss, dense, rtol=1e-12, atol=0)
    torch.testing.assert_close(logit_BC.grad, logit_GC.grad[mine], rtol=1e-12, atol=1e-15)
    assert (dict(traffic.calls), dict(traffic.num_bytes)) == ({"head/cross_entropy": 1}, {"head/cross_entropy": 24})
    each = F.cross_entropy(logit_GC.detach()[mine], label_G[mine], reduction="none")
    torch.testing.assert_close(head.row_losses(head.last_step, rows[world.rank]), each)


@pytest.mark.parametrize("label", [-1, -100, C])
def test_a_label_outside_of_the_range_is_an_error_on_all_ranks(world, label):
    head = CrossEntropy(C, world)
    label_B = torch.tensor([0, label if world.rank == world.size - 1 else 1, C - 1])
    here = str(label) if world.rank == world.size - 1 else "none on this rank"
    with pytest.raises(ValueError, match=rf"1 labels .*outside \[0, {C}\) .*{here}"):
        head(torch.zeros(3, C), label_B)
    assert head(torch.zeros(3, C), torch.tensor([0, 1, 2])).item() == pytest.approx(torch.log(torch.tensor(C)).item())


def test_shapes_that_do_not_fit_are_named(world):
    with pytest.raises(ValueError, match=rf"\(3, 4\).*\(B, {C}\)"):
        CrossEntropy(C, world)(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_have_a_wide_loss_and_a_narrow_gradient(world, dtype):
    logit_BC = torch.randn(4, C, generator=torch.Generator().manual_seed(world.rank)).to(dtype).requires_grad_()
    label_B = torch.arange(4)
    loss = CrossEntropy(C, world)(logit_BC, label_B)
    loss.backward()
    assert loss.dtype == torch.float32
    assert logit_BC.grad.dtype == dtype
    wide = logit_BC.detach().float().requires_grad_()
    (F.cross_entropy(wide, label_B, reduction="sum") / (4 * world.size)).backward()
    torch.testing.assert_close(logit_BC.grad, wide.grad.to(dtype))
