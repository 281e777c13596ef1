"""The ImageNet networks against torchvision's structure, written out from its documentation."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from recipes.imagenet import resnet
from tests.unit.state_shapes import digest


@pytest.mark.parametrize(
    ("name", "groups", "base", "expected", "num_parameters"),
    [
        ("resnet18", 1, 64, "46bd7814ec81", 11_689_512),
        ("resnet34", 1, 64, "31dac9343b6d", 21_797_672),
        ("resnet50", 1, 64, "eeb21a877a75", 25_557_032),
        ("resnet101", 1, 64, "13188e030a74", 44_549_160),
        ("resnet152", 1, 64, "0dcb7c814afa", 60_192_808),
        ("resnet50", 32, 4, "526e2c866246", 25_028_904),
        ("resnet101", 32, 8, "c8a00da5b30d", 88_791_336),
        ("resnet101", 64, 4, "ec344d12f020", 83_455_272),
    ],
)
def test_names_shapes_and_counts_are_torchvisions(name, groups, base, expected, num_parameters):
    """Counts are of torchvision's table of weights. (The digests are of its documented names and shapes.)"""
    build = partial(resnet.build, name, groups=groups, width_per_group=base)
    assert digest(build) == expected
    with torch.device("meta"):
        assert sum(p.numel() for p in build().parameters()) == num_parameters


@pytest.mark.parametrize("details", [resnet.TORCHVISION, resnet.CAFFE2])
@pytest.mark.parametrize(("name", "groups", "base"), [("resnet18", 1, 64), ("resnet50", 1, 64), ("resnet50", 4, 32)])
def test_equals_the_network_written_with_torchs_functions(name, groups, base, details):
    """In evaluation, from the state dict alone: strides, paddings, eps, and what the sums are of."""
    F = nn.functional
    torch.manual_seed(0)
    model = resnet.build(name, 7, groups=groups, width_per_group=base, details=details).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.eps, module.momentum) == (details.bn_eps, details.bn_momentum)
            module.running_mean.normal_()
            module.running_var.uniform_(0.001, 1)
            nn.init.uniform_(module.weight, 0.5, 1)
            nn.init.normal_(module.bias)
    w = model.state_dict()

    def norm(x, at):
        vectors = (w[f"{at}.{v}"] for v in ("running_mean", "running_var", "weight", "bias"))
        mean, var, weight, bias = (v.view(-1, 1, 1) for v in vectors)
        return (x - mean) / (var + details.bn_eps).sqrt() * weight + bias

    image = torch.rand(2, 3, 61, 61, dtype=torch.float64)
    x = F.relu(norm(F.conv2d(image, w["conv1.weight"], stride=2, padding=3), "bn1"))
    x = F.max_pool2d(x, 3, 2, details.pool_padding)
    for stage, depth in enumerate(resnet.NETWORKS[name][1]):
        for number in range(depth):
            at, stride = f"layer{stage + 1}.{number}", 2 if stage and not number else 1
            y, convs = x, 3 if name == "resnet50" else 2
            for place in range(1, convs + 1):
                kernel = w[f"{at}.conv{place}.weight"]
                strided = place == (2 if convs == 3 else 1)
                grouped = groups if place == 2 and convs == 3 else 1
                y = F.conv2d(y, kernel, None, stride if strided else 1, kernel.shape[-1] // 2, groups=grouped)
                y = norm(y, f"{at}.bn{place}")
                y = F.relu(y) if place < convs else y
            if f"{at}.downsample.0.weight" in w:
                x = norm(F.conv2d(x, w[f"{at}.downsample.0.weight"], stride=stride), f"{at}.downsample.1")
            x = F.relu(x + y)
    expected = F.linear(x.mean((2, 3)), w["fc.weight"], w["fc.bias"])
    with torch.no_grad():
        torch.testing.assert_close(model(image), expected, rtol=1e-9, atol=1e-9)


def test_start_values_are_caffe2s():
    torch.manual_seed(0)
    model = resnet.build("resnet50", 1000)
    for weight in (model.conv1.weight, model.layer3[0].conv2.weight):
        fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
        assert weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.03)
    bound = math.sqrt(3 / 2048)
    assert bound * 0.999 < model.fc.weight.abs().max() <= bound
    assert model.fc.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert not model.fc.bias.any()
    assert model.layer1[0].bn3.weight.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "shufflenet"}, "unknown network 'shufflenet', expected one of resnet18"),
        ({"name": "resnet18", "groups": 32}, "18 and 34 layers have no groups"),
        ({"name": "resnet50", "num_classes": -1}, "classes -1"),
        ({"name": "resnet50", "width_per_group": 0}, "width per group 0"),
    ],
)
def test_what_cannot_be_built_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        resnet.build(**arguments)
