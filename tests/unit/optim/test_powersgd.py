"""PowerSGD in one process: the algorithm of the paper, what is exempt, what is remembered."""

import pytest
import torch
from torch import nn

from partial_fc import comm
from partial_fc.optim.compression import build_compressor, merge_residuals
from partial_fc.optim.gradient_sync import GradientSync


def parameters(seed: int = 0, dtype=torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"conv.weight": (12, 5, 3, 3), "conv.bias": (12,), "fc.weight": (33, 17), "small.weight": (6, 9)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in shapes.items()}


def sync_of(named, rank=4, seed=0, **options) -> GradientSync:
    compressor = build_compressor("powersgd", rank=rank, seed=seed)
    return GradientSync(named.items(), comm.SingleWorld(), compressor=compressor, **options)


def one_update(named, sync, gradients, loss_scale=1.0):
    sync.zero(loss_scale)
    (loss_scale * sum((p * gradients[name]).sum() for name, p in named.items())).backward()
    sync.wait()


def gradients_of(named, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for name, p in named.items()
    }


def test_vectors_and_what_would_not_shrink_are_exact():
    """6 x 9 with 4 columns each would be 60 numbers instead of 54."""
    named = parameters()
    sync = sync_of(named)
    for step in range(2):
        gradients = gradients_of(named, step)
        one_update(named, sync, gradients)
        for name in ("conv.bias", "small.weight"):
            assert torch.equal(named[name].grad, gradients[name])
    compressed = {"conv.weight", "fc.weight"}
    assert sync.state().keys() == {f"{what}/{name}" for what in ("residual", "q") for name in compressed}
    numbers = 4 * (12 + 45) + 4 * (33 + 17) + 12 + 54
    assert sync.step_bytes().handed_in == 8 * numbers


def test_gradient_zero_and_of_less_rank_stay_finite():
    named = parameters(dtype=torch.float32)
    sync = sync_of(named)
    nothing = {name: torch.zeros_like(p) for name, p in named.items()}
    for gradients in (nothing, {name: torch.ones_like(p) for name, p in named.items()}, nothing):
        one_update(named, sync, gradients)
        assert sync.finite()
    assert all(t.isfinite().all() for t in sync.state().values())
    one_update(named, sync, {name: torch.ones_like(p) for name, p in named.items()})
    torch.testing.assert_close(named["fc.weight"].grad, torch.ones(33, 17))


def test_first_guess_depends_on_seed_and_name_only():
    one, same, other = (
        sync_of(parameters(seed), seed=guess, bucket_bytes=size).state()
        for seed, guess, size in ((0, 3, None), (1, 3, 1), (0, 4, None))
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["q/fc.weight"], other["q/fc.weight"])
    assert not torch.equal(one["q/fc.weight"][:17], one["q/conv.weight"][:17])


def test_state_goes_on_where_it_stopped():
    first, second = parameters(), parameters()
    sync, other = sync_of(first), sync_of(second, seed=9)
    one_update(first, sync, gradients_of(first, 0))
    other.load_state(sync.state())
    for step in range(1, 4):
        gradients = gradients_of(first, step)
        one_update(first, sync, gradients)
        one_update(second, other, gradients)
        assert all(torch.equal(first[name].grad, second[name].grad) for name in first)


def test_states_that_do_not_belong_together_are_refused():
    residual = {"residual/a": torch.zeros(3)}
    with pytest.raises(ValueError, match="state 1 names other tensors"):
        merge_residuals([residual, {"residual/b": torch.zeros(3)}], 2)
    with pytest.raises(ValueError, match=r"state 1: residual/a has shape \(4,\), \(3,\) before"):
        merge_residuals([residual, {"residual/a": torch.zeros(4)}], 2)


def test_a_kind_that_remembers_nothing_refuses_a_state():
    sync = GradientSync(parameters().items(), comm.SingleWorld())
    sync.load_state(sync.state())
    with pytest.raises(ValueError, match=r"compression none: the state has \['q/a'\], expected \[\]"):
        sync.load_state({"q/a": torch.zeros(1)})
