"""The teacher's part of the loss: its value and gradient on any number of ranks."""

from contextlib import nullcontext

import pytest
import torch

from partial_fc.train.teacher import Teacher
from tests.unit.thread_world import in_world

N, D, WEIGHT = 12, 5, 0.7


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loss_and_gradient_are_those_of_the_whole_batch(num_ranks):
    generator = torch.Generator().manual_seed(3)
    input_ND, output_ND = (torch.randn(N, D, generator=generator) for _ in range(2))
    matrix = torch.randn(D, D, generator=generator, requires_grad=True)

    # The reference: one process, two micro-batches of 4 and 8, in plain numbers.
    whole = output_ND.double().requires_grad_()
    target = input_ND.double() @ matrix.detach().double()
    cosine_N = (whole * target).sum(1) / (whole.norm(dim=1) * target.norm(dim=1))
    expected = WEIGHT * (1 - cosine_N).mean()
    expected.backward()

    def act(world):
        teacher = Teacher(lambda input_B: input_B @ matrix, WEIGHT, world, nullcontext)
        leaf = output_ND.clone().requires_grad_()
        values = []
        for begin, end in ((0, 4), (4, 12)):
            rows = range(begin, end)[world.rank :: world.size]
            loss = teacher(leaf[list(rows)], input_ND[list(rows)], end - begin, (end - begin) / N)
            loss.backward()
            values.append(loss.item())
        return values, leaf.grad, teacher.drain(), teacher.drain()

    found = in_world(num_ranks, act)
    assert matrix.grad is None
    assert len({tuple(values) for values, *_ in found}) == 1
    values, _, mean, after = found[0]
    assert sum(values) == pytest.approx(expected.item(), rel=1e-6)
    assert mean == pytest.approx(sum(values))
    assert after == 0
    torch.testing.assert_close(sum(grad for _, grad, *_ in found), whole.grad.float(), rtol=1e-5, atol=1e-7)
