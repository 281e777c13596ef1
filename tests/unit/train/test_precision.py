"""Precision modes: what is computed in which dtype, the loss scale, the fp32 masters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partial_fc import models
from partial_fc.comm import SingleWorld
from partial_fc.machine import has_bf16
from partial_fc.train.precision import LossScaler, Precision, Weights, add_up_convolutions_in_fp32, choose

CPU = torch.device("cpu")


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return models.build("tiny", 16, 24)


def test_auto_is_bf16_only_where_the_hardware_has_it():
    assert choose("auto", CPU, SingleWorld()) == ("bf16" if has_bf16(CPU) else "fp32")
    assert choose("fp16", CPU, SingleWorld()) == "fp16"


@pytest.mark.parametrize(
    ("mode", "parameter", "buffer"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.float32),
        ("fp16", torch.float32, torch.float32),
        ("fp16-o2", torch.float16, torch.float32),
        ("fp64", torch.float64, torch.float64),
    ],
)
def test_dtypes_of_a_mode(mode, parameter, buffer):
    precision = Precision(mode, CPU)
    module = backbone().to(precision.parameter_dtype)
    seen = []
    module.layer1[0].conv2.register_forward_hook(lambda _m, _x, output: seen.append(output.dtype))
    precision.prepare(module)
    assert module.layer1[0].conv1.weight.dtype == parameter
    assert module.layer1[0].bn1.weight.dtype == buffer
    assert module.layer1[0].bn1.running_mean.dtype == buffer
    with precision.autocast():
        feat_BD = module(precision.as_input(torch.rand(2, 3, 24, 24)))
    computed = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16-o2": torch.float16}
    assert seen == [computed.get(mode, parameter)]
    assert feat_BD.dtype == buffer
    assert (precision.scaler is not None) == mode.startswith("fp16")


def test_the_loss_scale_follows_apex():
    """Start 2^16; halved by an overflow; doubled after 2,000 clean updates in a row; at most 2^24."""
    scaler = LossScaler()
    assert scaler.scale == 2.0**16
    for _ in range(1999):
        scaler.update(overflowed=False)
    scaler.update(overflowed=True)
    assert scaler.state() == {"scale": 2.0**15, "clean_steps": 0}
    for _ in range(2000):
        assert scaler.scale == 2.0**15
        scaler.update(overflowed=False)
    assert scaler.state() == {"scale": 2.0**16, "clean_steps": 0}
    scaler.load_state({"scale": 2.0**24, "clean_steps": 1999})
    scaler.update(overflowed=False)
    assert scaler.scale == 2.0**24


def test_an_overflow_that_no_scale_explains_is_an_error():
    scaler = LossScaler()
    for _ in range(16):
        scaler.update(overflowed=True)
    assert scaler.scale == 1.0
    with pytest.raises(FloatingPointError, match="not finite at loss scale 1"):
        scaler.update(overflowed=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_wide_convolutions_equal_fp32_on_rounded_numbers(dtype, groups):
    """Forward and backward; against float64 no worse than fp32 sums of 16-bit products have to be."""
    torch.manual_seed(0)
    narrow = nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=groups)
    wide = nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=groups)
    wide.load_state_dict(narrow.state_dict())
    names = list(narrow.state_dict())
    add_up_convolutions_in_fp32(narrow)
    assert list(narrow.state_dict()) == names
    x = torch.randn(5, 6, 11, 7)
    with torch.autocast("cpu", dtype):
        y = narrow(x)
    assert y.dtype == dtype
    slope = torch.randn(y.shape).to(dtype)
    y.backward(slope)

    rounded = [t.to(dtype).double().requires_grad_() for t in (x, wide.weight.detach(), wide.bias.detach())]
    exact = F.conv2d(*rounded, stride=2, padding=1, groups=groups)
    exact.backward(slope.double())
    step = torch.finfo(dtype).eps
    assert (y.double() - exact).abs().max() <= step * exact.abs().max()
    for ours, theirs in zip((narrow.weight.grad, narrow.bias.grad), rounded[1:], strict=True):
        assert (ours - theirs.grad).abs().max() <= step * theirs.grad.abs().max()


def test_masters_hold_what_halves_round_away():
    """Steps below the resolution of float16 add up."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weights = Weights(module, halve=True)
    named = dict(weights.named_parameters())
    assert [p.dtype for p in named.values()] == [torch.float32] * 4
    assert module[0].weight.dtype == torch.float16
    assert named["1.weight"] is module[1].weight
    with torch.no_grad():
        named["0.weight"].fill_(1.0)
        for _ in range(100):
            named["0.weight"].add_(1e-4)
            weights.publish()
    assert module[0].weight.float().eq(torch.tensor(1.01).half().float()).all()


def test_weights_of_one_mode_load_in_any_other():
    """A state dict is fp32 under the same names; loading the masters' loses nothing."""
    saved = {}
    for mode in ("fp32", "fp16-o2"):
        module = backbone()
        weights, _ = Precision(mode, CPU).prepare(module)
        saved[mode] = {name: t.clone() for name, t in weights.state_dict().items()}
    assert saved["fp32"].keys() == saved["fp16-o2"].keys()
    for name, t in saved["fp32"].items():
        assert t.dtype == saved["fp16-o2"][name].dtype
        assert torch.equal(t, saved["fp16-o2"][name])

    module = backbone()
    weights, _ = Precision("fp16-o2", CPU).prepare(module)
    weights.load_state_dict({name: t * 3 if t.is_floating_point() else t for name, t in saved["fp32"].items()})
    assert torch.equal(dict(weights.named_parameters())["conv1.weight"], saved["fp32"]["conv1.weight"] * 3)
    assert torch.equal(module.conv1.weight, (saved["fp32"]["conv1.weight"] * 3).half())
