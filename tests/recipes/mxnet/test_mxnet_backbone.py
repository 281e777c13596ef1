"""The backbone that computes in MXNet, beside the one in torch."""

import copy
import math
import sys
from functools import partial

import pytest
import torch
from torch import nn

from partial_fc import models
from partial_fc.models.iresnet import IResNet
from recipes.face import backbone as face_backbone
from recipes.face import main as face
from recipes.mxnet.symbol_file import mxnet_names, symbol_json


def both(net: IResNet) -> tuple[IResNet, IResNet]:
    """The network for torch, and the same for MXNet."""
    from recipes.mxnet.graph import compute_in_mxnet

    return net, compute_in_mxnet(copy.deepcopy(net))


@pytest.mark.mxnet
@pytest.mark.parametrize("name", ["mini", "r18"])
def test_features_gradients_and_statistics_are_those_of_torch(mx, name):
    torch.manual_seed(0)
    nets = both(models.build(name, 32, 32))
    assert list(nets[0].state_dict()) == list(nets[1].state_dict())
    image_B, slope_B = torch.randn(8, 3, 32, 32), torch.randn(8, 32)
    found = []
    for net in nets:
        named = {n: p for n, p in net.named_parameters() if p.requires_grad}
        feat_B = net(image_B)
        gradients = torch.autograd.grad(feat_B, list(named.values()), slope_B)
        net.eval()
        with torch.no_grad():
            after_B = net(image_B)
        found.append((feat_B, dict(zip(named, gradients, strict=True)), after_B, dict(net.named_buffers())))
    (feat, grads, after, buffers), (its_feat, its_grads, its_after, its_buffers) = found
    whole = torch.stack([g.norm() for g in grads.values()]).norm()
    assert {n: g.shape for n, g in its_grads.items()} == {n: g.shape for n, g in grads.items()}
    for n, g in grads.items():
        assert (its_grads[n] - g).norm() <= 1e-3 * whole, n
    assert (its_feat - feat).norm() <= 1e-5 * feat.norm()
    assert (its_after - after).norm() <= 1e-4 * after.norm()
    torch.testing.assert_close(its_buffers, buffers, atol=1e-5, rtol=1e-4)


@pytest.mark.mxnet
@pytest.mark.parametrize(
    ("name", "arguments", "states"),
    # As InsightFace's own symbols have them: (arrays, numbers).
    [
        pytest.param("r50", (238, 43_590_848), (158, 38_144), marks=pytest.mark.long),
        ("r100", (463, 65_156_160), (308, 69_632)),
    ],
)
def test_a_symbol_has_the_arrays_of_insightface(mx, name, arguments, states):
    with torch.device("meta"):
        net = models.build(name)
    symbol = mx.sym.load_json(symbol_json(net))
    theirs = mxnet_names(net)
    shapes, _, state_shapes = symbol.infer_shape(data=(1, 3, 112, 112))
    for kind, names, sizes, expected in (
        ("arg", symbol.list_arguments()[1:], shapes[1:], arguments),
        ("aux", symbol.list_auxiliary_states(), state_shapes, states),
    ):
        ours = {n.partition(":")[2]: tuple(net.state_dict()[o].shape) for o, n in theirs.items() if n.startswith(kind)}
        assert ours == dict(zip(names, sizes, strict=True))
        assert (len(names), sum(math.prod(size) for size in sizes)) == expected


def features_and_gradient(net: nn.Module, image_B: torch.Tensor, slope_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
    feat_B = net(image_B)
    trained = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(feat_B, trained, slope_B.to(feat_B.dtype))
    return feat_B.detach(), torch.cat([g.flatten() for g in gradients])


@pytest.mark.mxnet
@pytest.mark.parametrize(("bends", "features_off", "gradient_off"), [(False, 1e-5, 1e-5), (True, 1e-4, 1e-2)])
def test_one_update_is_as_near_to_fp64_as_that_of_torch_channels_last(mx, bends, features_off, gradient_off):
    """docs/recipes/mxnet.md: both add up in fp32 in batch norms, which moves values over the kinks of ReLU."""
    torch.manual_seed(0)
    activation = (lambda _: nn.ReLU()) if bends else partial(nn.PReLU, init=1.0)
    net = IResNet((2, 1, 1), 128, 40, widths=(32, 64, 128), strides=(2, 1, 2, 2), activation=activation)
    image_B, slope_B = torch.randn(32, 3, 40, 40), torch.randn(32, 128)
    exact = features_and_gradient(copy.deepcopy(net).double(), image_B.double(), slope_B)
    ours, theirs = both(net.to(memory_format=torch.channels_last))
    off = [
        [
            ((a - b).norm() / b.norm()).item()
            for a, b in zip(features_and_gradient(n, image_B, slope_B), exact, strict=True)
        ]
        for n in (ours, theirs)
    ]
    assert off[1][0] < min(features_off, 3 * off[0][0] + 1e-6)
    assert off[1][1] < min(gradient_off, 3 * off[0][1] + 1e-6)


def test_a_missing_mxnet_is_said_with_the_command(monkeypatch):
    monkeypatch.delitem(sys.modules, "recipes.mxnet.library", raising=False)
    monkeypatch.setitem(sys.modules, "mxnet", None)
    flags = face.ModelFlags(engine="mxnet", network="tiny", embedding_size=8)
    with pytest.raises(ValueError, match=r"--engine mxnet: .*pip install --no-deps mxnet=="):
        face_backbone.build(flags, 32, torch.device("cpu"))
