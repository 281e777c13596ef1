"""SlowFast: sizes of the published networks, one stage against plain NumPy, what the clips must be."""

import numpy as np
import pytest
import torch

from recipes.kinetics import gluoncv_files as gluoncv
from recipes.kinetics import slowfast

R50 = "slowfast_4x16_resnet50_kinetics400"


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "slow", "fast"),
    [(R50, 4, 32), ("slowfast_8x8_resnet50_kinetics400", 8, 32), ("slowfast_8x8_resnet101_kinetics400", 8, 32)],
)
def test_shapes_of_the_stages(name, slow, fast):
    with torch.device("meta"):
        model = slowfast.build(name)
        shapes = {}
        for part, module in model.named_children():
            module.register_forward_hook(lambda _m, _i, out, part=part: shapes.__setitem__(part, tuple(out.shape[1:])))
        assert model(torch.empty(2, 3, fast + slow, 224, 224)).shape == (2, 400)
    for number, (stage, side) in enumerate(zip(("res2", "res3", "res4", "res5"), (56, 28, 14, 7), strict=True)):
        assert shapes[f"slow_{stage}"] == (256 << number, slow, side, side)
        assert shapes[f"fast_{stage}"] == (32 << number, fast, side, side)
    laterals = [shapes[f"lateral_{after}"] for after in ("p1", "res2", "res3", "res4")]
    assert laterals == [(16, slow, 56, 56), (64, slow, 56, 56), (128, slow, 28, 28), (256, slow, 14, 14)]
    assert model.fc.in_features == 2304


def test_counts_of_the_published_networks():
    with torch.device("meta"):
        assert parameters(slowfast.build(R50)) == 34_480_216


def convolved(x_CTHW, weight_OIKHW, stride, padding):
    x = np.pad(x_CTHW, [(0, 0), *((p, p) for p in padding)])
    windows = np.lib.stride_tricks.sliding_window_view(x, weight_OIKHW.shape[2:], axis=(1, 2, 3))
    return np.einsum("ithwabc,oiabc->othw", windows[:, :: stride[0], :: stride[1], :: stride[2]], weight_OIKHW)


def test_a_stage_equals_plain_numpy():
    """The first block of the slow res4: the temporal kernel, the stride and the shortcut with a convolution."""
    torch.manual_seed(1)
    block = slowfast.build(R50, 5, width=8).double().eval().slow_res4[0]
    for module in block.modules():
        if isinstance(module, torch.nn.BatchNorm3d):
            for t in (module.weight.data, module.running_var):
                t.uniform_(0.5, 2)
            for t in (module.bias.data, module.running_mean):
                t.normal_()
    state = {name: t.numpy() for name, t in block.state_dict().items()}

    def norm(x, name):
        shape = (-1, 1, 1, 1)
        mean, var, weight, bias = (
            state[f"{name}.{part}"].reshape(shape) for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / np.sqrt(var + 1e-5) * weight + bias

    x = np.random.default_rng(0).normal(size=(block.conv1.in_channels, 4, 6, 6))
    y = np.maximum(norm(convolved(x, state["conv1.weight"], (1, 1, 1), (1, 0, 0)), "bn1"), 0)
    y = np.maximum(norm(convolved(y, state["conv2.weight"], (1, 2, 2), (0, 1, 1)), "bn2"), 0)
    y = norm(convolved(y, state["conv3.weight"], (1, 1, 1), (0, 0, 0)), "bn3")
    shortcut = norm(convolved(x, state["downsample.0.weight"], (1, 2, 2), (0, 0, 0)), "downsample.1")
    found = block(torch.from_numpy(x)[None])[0].detach().numpy()
    np.testing.assert_allclose(found, np.maximum(y + shortcut, 0), rtol=1e-10, atol=1e-10)


@pytest.mark.mxnet
def test_parameters_that_mxnet_wrote(tmp_path):
    """Under the names that GluonCV's blocks have."""
    from recipes.mxnet.library import mx

    torch.manual_seed(3)
    theirs, ours = (slowfast.build(R50, 7, width=8) for _ in range(2))
    arrays = {name: mx.nd.array(t.numpy()) for name, t in gluoncv.arrays(theirs).items()}
    for name in ("fast_res2.0.downsample.1.running_var", "lateral_res3.1.gamma", "slow_res5.2.conv3.weight", "fc.bias"):
        assert name in arrays
    path = tmp_path / "slowfast.params"
    mx.nd.save(str(path), arrays)
    gluoncv.load(ours, path)
    assert all(torch.equal(t, ours.state_dict()[name]) for name, t in theirs.state_dict().items())
    other = slowfast.build(R50, 9, width=8)
    with pytest.raises(ValueError, match=r"2 of another shape or kind: fc\.weight"):
        gluoncv.load(other, path)
    del arrays["lateral_res3.1.gamma"]
    mx.nd.save(str(path), arrays)
    with pytest.raises(ValueError, match=r"1 missing: lateral_res3\.1\.weight"):
        gluoncv.load(ours, path)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="unknown network 'slowfast'"):
        slowfast.build("slowfast")
    with pytest.raises(ValueError, match="width 12,"):
        slowfast.build(R50, width=12)
    with torch.device("meta"), pytest.raises(ValueError, match=r"35 frames; expected 32 for the fast .* then 4"):
        slowfast.build(R50)(torch.empty(1, 3, 35, 64, 64))
