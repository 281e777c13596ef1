import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partial_fc import models
from partial_fc.models.iresnet import DEPTHS, IResNet
from tests.unit.state_shapes import digest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "embedding_size", "image_size", "expected"),
    [
        ("r18", 512, 112, "8a1772fbc5b6"),
        ("r34", 512, 112, "99eee08adc53"),
        ("r50", 512, 112, "8b10e3d3ada4"),
        ("r100", 512, 112, "ad0e1bc1440b"),
        ("r200", 512, 112, "7ebf19f5cb85"),
        ("r18", 256, 100, "183da8bd9917"),
        ("mbf", 512, 112, "d328258b96e4"),
        ("mbf", 128, 40, "d130730e372a"),
        ("vit_s_dp005_mask_0", 512, 112, "69411c7bb972"),
    ],
)
def test_names_and_shapes_are_those_of_arcface_torch(name, embedding_size, image_size, expected):
    """(They were compared with lists written down from its published weights.)"""
    assert digest(partial(models.build, name, embedding_size, image_size)) == expected


def iresnet_by_hand(weights: dict[str, Tensor], depths: tuple[int, ...], x: Tensor) -> Tensor:
    """Evaluates an iresnet from its state dict alone."""

    def norm(at: str, x: Tensor) -> Tensor:
        mean, var = weights[f"{at}.running_mean"], weights[f"{at}.running_var"]
        return F.batch_norm(x, mean, var, weights[f"{at}.weight"], weights[f"{at}.bias"], eps=1e-5)

    x = F.prelu(norm("bn1", F.conv2d(x, weights["conv1.weight"], padding=1)), weights["prelu.weight"])
    for stage, depth in enumerate(depths, start=1):
        for number in range(depth):
            at, stride = f"layer{stage}.{number}", 2 if number == 0 else 1
            y = norm(f"{at}.bn2", F.conv2d(norm(f"{at}.bn1", x), weights[f"{at}.conv1.weight"], padding=1))
            y = F.prelu(y, weights[f"{at}.prelu.weight"])
            y = norm(f"{at}.bn3", F.conv2d(y, weights[f"{at}.conv2.weight"], stride=stride, padding=1))
            if number == 0:
                x = F.conv2d(x, weights[f"{at}.downsample.0.weight"], stride=stride)
                x = norm(f"{at}.downsample.1", x)
            x = x + y
    return norm("features", F.linear(norm("bn2", x).flatten(1), weights["fc.weight"], weights["fc.bias"]))


def test_iresnet_computes_what_its_weights_mean():
    torch.manual_seed(0)
    model = models.build("r18", 32, image_size=37).double()
    image = torch.randn(3, 3, 37, 37, dtype=torch.float64)
    model(image)  # running statistics other than 0 and 1
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    by_hand = iresnet_by_hand(model.state_dict(), (2, 2, 2, 2), image)
    torch.testing.assert_close(model.eval()(image), by_hand)


@pytest.mark.parametrize("name", ["r18", "mbf", "mini"])
@pytest.mark.parametrize(("image_size", "channels"), [(16, 3), (33, 1), (40, 3)])
def test_every_network_takes_odd_sizes_and_trains_all_but_the_fixed_scale(name, image_size, channels):
    torch.manual_seed(0)
    model = models.build(name, embedding_size=24, image_size=image_size, in_channels=channels, dropout=0.2)
    feat_BD = model(torch.randn(3, channels, image_size, image_size))
    assert feat_BD.shape == (3, 24)
    assert feat_BD.dtype == torch.float32
    (feat_BD * torch.randn(3, 24)).sum().backward()
    fixed = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    # A bias before a batch norm moves nothing: its gradient is zero or rounding.
    assert set(fixed) - {"fc.bias"} == (set() if name == "mbf" else {"features.weight"})


def with_half_weights(model: nn.Module, dtype: torch.dtype = torch.half) -> nn.Module:
    model = copy.deepcopy(model)
    kept = models.keeps_fp32(model)
    for module in model.modules():
        for p in module.parameters(recurse=False) if module not in kept else ():
            p.data = p.data.to(dtype)
    return model


def features_and_gradients(model: nn.Module, image_B3HW: Tensor, weight_BD: Tensor) -> list[Tensor]:
    feat_BD = model(image_B3HW.to(next(model.parameters()).dtype))
    (feat_BD * weight_BD).sum().backward()
    return [feat_BD.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def relative_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Of all values together; the largest ones count most."""
    difference = torch.cat([(a - b).flatten() for a, b in zip(found, wanted, strict=True)])
    return (difference.norm() / torch.cat([b.flatten() for b in wanted]).norm()).item()


def narrow_r18(embedding_size: int, image_size: int, dropout: float = 0.0) -> nn.Module:
    """CPUs without fp16 arithmetic take a minute over the whole one."""
    return IResNet(DEPTHS["r18"], embedding_size, image_size, dropout=dropout, widths=(8, 16, 24, 32))


@pytest.mark.parametrize("build", [narrow_r18, partial(models.build, "mbf"), partial(models.build, "tiny")])
def test_with_half_weights_features_are_fp32_and_no_worse_than_under_autocast(build):
    torch.manual_seed(0)
    model = build(embedding_size=16, image_size=16)
    half = with_half_weights(model)
    image, weight = torch.randn(6, 3, 16, 16), torch.randn(6, 16)
    exact = features_and_gradients(copy.deepcopy(model).double(), image, weight)
    with torch.autocast("cpu", dtype=torch.float16):
        naive = features_and_gradients(copy.deepcopy(model), image, weight)
    ours = features_and_gradients(half, image, weight)
    assert ours[0].dtype == torch.float32
    assert {p.dtype for p in half.parameters()} == {torch.float16, torch.float32}
    assert all(p.grad.dtype == p.dtype for p in half.parameters() if p.grad is not None)
    assert all(buffer.dtype != torch.float16 for buffer in half.buffers())
    for found, autocast, wanted in ((ours[:1], naive[:1], exact[:1]), (ours[1:], naive[1:], exact[1:])):
        assert relative_error(found, wanted) < 1.5 * relative_error(autocast, wanted) + 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "r122"}, "unknown network 'r122', expected one of r18"),
        ({"name": "r50", "image_size": 15}, "too small for r50.*at least 16 pixels"),
        ({"name": "mbf", "image_size": 8}, "too small for mbf"),
        ({"name": "tiny", "dropout": 1.0}, "dropout is 1.0"),
        ({"name": "tiny", "embedding_size": 0}, "embedding size 0"),
    ],
)
def test_what_cannot_be_built_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build(**arguments)
