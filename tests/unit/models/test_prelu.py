"""PReLU's own backward against torch's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partial_fc.models.iresnet import PReLU


def output_and_gradients(layer: nn.Module, x: Tensor, slope: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(slope)
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_torchs_prelu_to_the_last_bit(dtype, layout):
    torch.manual_seed(0)
    ours, theirs = PReLU(5).to(dtype), nn.PReLU(5).to(dtype)
    start = torch.tensor([0.25, -0.5, 0.0, 1.0, 3.0], dtype=dtype)
    for layer in (ours, theirs):
        layer.weight.data.copy_(start)
    x = torch.randn(3, 5, 7, 9, dtype=dtype).to(memory_format=layout)
    x[0, :, 0, 0] = 0.0
    slope = torch.randn_like(x)
    found, wanted = output_and_gradients(ours, x, slope), output_and_gradients(theirs, x, slope)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[2], wanted[2])  # a sum, whose order may differ


def test_under_autocast_it_is_no_worse_than_torchs():
    torch.manual_seed(0)
    ours = PReLU(6)
    x, slope = torch.randn(4, 6, 33, 33).bfloat16(), torch.randn(4, 6, 33, 33).bfloat16()
    theirs = copy.deepcopy(ours)
    theirs.__class__ = nn.PReLU
    with torch.autocast("cpu", torch.bfloat16):
        found, torchs = output_and_gradients(ours, x, slope), output_and_gradients(theirs, x, slope)
    exact = output_and_gradients(nn.PReLU(6).double(), x.double(), slope.double())
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    for one, other, wanted in zip(found, torchs, exact, strict=True):
        assert (one - wanted).norm() <= (other - wanted).norm() * 1.0001


def test_in_evaluation_it_is_torchs_own():
    """What exports a network follows it there."""
    layer, x = PReLU(3), torch.randn(2, 3, 4, 4)
    assert layer(x).grad_fn.name() == "_PReLUBackward"
    assert layer.eval()(x).grad_fn.name() == F.prelu(x, layer.weight).grad_fn.name()
