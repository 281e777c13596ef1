import copy

import pytest
import torch
from torch import Tensor, nn

from partial_fc.train.batch_norm import convert
from tests.unit.thread_world import Meeting, ThreadWorld, in_world


def network() -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.PReLU(5), nn.Flatten(), nn.Linear(80, 7),
        nn.BatchNorm1d(7),
    )  # fmt: skip
    for p in net.parameters():
        p.data += 0.3 * torch.randn_like(p)
    net[6].weight.requires_grad_(False)
    return net


def step(net: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that is a sum over the rows, so that the ranks' losses add up to the one of the whole batch."""
    x = x.clone().requires_grad_()
    y = net(x)
    (y * weight).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("rows", [[4, 4], [5, 1, 3], [6, 0], [1, 1]])
def test_ranks_together_equal_one_batch_norm_over_the_whole_batch(rows):
    start, num = network().double(), sum(rows)
    dense = copy.deepcopy(start)
    x = 2 * torch.randn(num, 3, 6, 6, dtype=torch.float64) + 5
    weight = torch.randn(num, 7, dtype=torch.float64)

    def job(world):
        mine = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
        local = convert(copy.deepcopy(start), world)
        results = [step(local, x[mine] + shift, weight[mine]) for shift in (0, 1)]
        return local, results

    ranks = in_world(len(rows), job)
    for shift in (0, 1):  # two steps, so that gradients and running statistics accumulate
        y, x_grad = step(dense, x + shift, weight)
        torch.testing.assert_close(torch.cat([results[shift][0] for _, results in ranks]), y)
        torch.testing.assert_close(torch.cat([results[shift][1] for _, results in ranks]), x_grad)
    for name, parameter in dense.named_parameters():
        parts = [local.get_parameter(name).grad for local, _ in ranks]
        if parameter.grad is None:
            assert parts == [None] * len(rows)
        else:  # local contributions: their sum is the gradient
            torch.testing.assert_close(torch.stack(parts).sum(0), parameter.grad)
    for name, buffer in dense.named_buffers():
        for local, _ in ranks:
            torch.testing.assert_close(local.get_buffer(name), buffer)
            assert torch.equal(local.get_buffer(name), ranks[0][0].get_buffer(name))


def test_a_mean_far_from_zero_keeps_the_digits():
    x = 1000 + torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def job(world):
        norm = convert(nn.BatchNorm1d(4, momentum=1.0), world)
        return norm(x[32 * world.rank :][:32]), norm.running_var

    ranks = in_world(2, job)
    exact = x.double()
    torch.testing.assert_close(ranks[0][1].double(), exact.var(0), rtol=1e-5, atol=0)
    expected = (exact - exact.mean(0)) / (exact.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(torch.cat([y for y, _ in ranks]).double(), expected, rtol=0, atol=2e-4)


def test_bfloat16_is_summed_in_float32():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(301, 4, 3, 3, generator=generator).bfloat16()
    weight = torch.randn(301, 4, 3, 3, generator=generator).bfloat16()

    def job(world):
        mine = slice(0, 200) if world.rank == 0 else slice(200, 301)
        return step(convert(nn.BatchNorm2d(4), world), x[mine], weight[mine])

    ranks = in_world(2, job)
    y_exact, grad_exact = step(nn.BatchNorm2d(4).double(), x.double(), weight.double())
    y_naive, grad_naive = step(nn.BatchNorm2d(4), x, weight)
    for number, (exact, naive) in enumerate([(y_exact, y_naive), (grad_exact, grad_naive)]):
        ours = torch.cat([result[number] for result in ranks])
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - exact).abs().max() <= (naive.double() - exact).abs().max() + 1e-3


def test_eval_uses_running_statistics_without_collectives():
    dense = network()
    dense(torch.randn(4, 3, 6, 6))
    world = ThreadWorld(0, Meeting(2))
    shared = convert(copy.deepcopy(dense), world).eval()
    x = torch.randn(3, 3, 6, 6)
    assert torch.equal(shared(x), dense.eval()(x))
    assert not world.traffic.calls


def test_one_value_in_the_global_batch_is_an_error_on_every_rank():
    def job(world):
        norm = convert(nn.Sequential(nn.BatchNorm1d(4)), world)
        with pytest.raises(ValueError, match=r"0: the global batch has 1 value\(s\) per channel"):
            norm(torch.randn(1 - world.rank, 4))
        return True

    assert in_world(2, job) == [True, True]


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_a_norm_of_another_kind_is_named(options):
    with pytest.raises(ValueError, match="0: cannot share BatchNorm2d"):
        convert(nn.Sequential(nn.BatchNorm2d(3, **options)), ThreadWorld(0, Meeting(2)))
