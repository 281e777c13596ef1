"""The backbone that computes in MXNet, beside the one in torch."""

import copy
import json
import math
import sys
from functools import partial

import pytest
import torch
from torch import nn

from partial_fc import models
from partial_fc.foreign import ndarray_file
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
    [("r50", (238, 43_590_848), (158, 38_144)), ("r100", (463, 65_156_160), (308, 69_632))],
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


# ---- any network of MXNet's


@pytest.fixture
def files(mx, tmp_path):
    """A network of MXNet's that ends in a loss layer: (its symbol, its arrays, what writes both)."""
    from tests.recipes.mxnet.mxnet_network import arrays_of, small_network

    symbol = small_network(mx)
    return symbol, arrays_of(mx, symbol, 24), partial(write, tmp_path)


def write(folder, symbol, arrays, text: str | None = None):
    """Paths of the two files."""
    paths = folder / "net-symbol.json", folder / "net-0000.params"
    paths[0].write_text(symbol.tojson() if text is None else text)
    ndarray_file.write(paths[1], arrays)
    return paths


@pytest.mark.mxnet
def test_a_network_up_to_its_loss_layer_or_to_the_output_that_is_named(mx, files):
    from recipes.mxnet.symbol import read_network

    symbol, arrays, write = files
    paths = write(symbol, arrays)
    network, width, notes = read_network(*paths, None, 24)
    assert (network.output_name, width, notes) == ("fc7_output", 10, [])
    network, width, notes = read_network(*paths, "fc1", 24)
    assert (network.output_name, width) == ("fc1_output", 8)
    assert "arg:fc7_weight" in notes[0]
    # Names are MXNet's own; batch norms' statistics are buffers; a gamma that MXNet fixes is 1, whatever the file says.
    assert dict(network.named_parameters()).keys() == {n[4:] for n in arrays if n.startswith("arg:") and "fc7" not in n}
    assert dict(network.named_buffers()).keys() == {n[4:] for n in arrays if n.startswith("aux:")}
    assert [n for n, p in network.named_parameters() if not p.requires_grad] == ["bn0_gamma"]
    assert (network.bn0_gamma == 1).all()
    for n, buffer in network.named_buffers():
        assert torch.equal(buffer, arrays[f"aux:{n}"]), "trying it out leaves no trace"


@pytest.mark.mxnet
def test_an_argument_whose_rate_is_0_is_kept_and_said(mx, tmp_path):
    """The bias beside it has its gradient all the same."""
    from recipes.mxnet.symbol import read_network

    weight, bias = mx.sym.Variable("w", lr_mult=0), mx.sym.Variable("dotted.b", wd_mult=0)
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), weight, bias, num_hidden=4, name="fc")
    arrays = {"arg:w": torch.rand(4, 48), "arg:dotted.b": torch.rand(4)}
    network, _, (note,) = read_network(*write(tmp_path, symbol, arrays), None, 4)
    assert {n: p.requires_grad for n, p in network.named_parameters()} == {"w": False, "dotted.b": True}
    assert "lr_mult and wd_mult, of dotted.b, w, are not followed" in note
    network(torch.rand(2, 3, 4, 4)).backward(torch.ones(2, 4))
    assert network.get_parameter("dotted.b").grad.tolist() == [2.0] * 4


@pytest.mark.mxnet
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unknown output", "no output fc2; did you mean .*fc1.* has: .*fc7_output, fc1_output"),
        ("loss", "loss layer softmax"),
        ("four dimensions", "gives \\(2, 4, 6, 6\\) for .* expected \\(2, width"),
        ("no gradient", "cannot train it: .*_shuffle is non-differentiable"),
        ("gradient stopped", "no gradient reaches an argument"),
        ("two outputs", "2 outputs: fc7_output, fc1_output"),
        ("no input", "must be named data; its arguments are image"),
        ("operator", "no symbol that MXNet 1.9.1 reads: .*FullyConn"),
        ("no symbol", "no symbol that MXNet 1.9.1 reads"),
        ("empty", "no symbol that MXNet 1.9.1 reads: the file is empty"),
        ("lacking", "does not fit .*1 missing: arg:conv0_weight"),
        ("shape", "--image-size 32: .*pre_fc1_weight is \\(8, 144\\), expected \\(8, 256\\)"),
        ("fp16", "arg:bn0_beta is torch.float16, expected torch.float32; cast the network"),
        ("names", "do not begin with arg: or aux:"),
    ],
)
def test_what_is_wrong_with_a_network_is_said(mx, files, case, message):
    from recipes.mxnet.symbol import read_network

    symbol, arrays, write = files
    inner = symbol.get_internals()
    fc1, json_text, bn0 = inner["fc1_output"], symbol.tojson(), arrays["arg:bn0_beta"]
    given = {"symbol": symbol, "arrays": arrays, "text": None, "name": None, "size": 24}
    given |= {
        "unknown output": lambda: {"name": "fc2"},
        "loss": lambda: {"name": "softmax"},
        "four dimensions": lambda: {"name": "pool0"},
        "no gradient": lambda: {"symbol": mx.sym.shuffle(fc1)},
        "gradient stopped": lambda: {"symbol": mx.sym.BlockGrad(fc1)},
        "two outputs": lambda: {"symbol": mx.sym.Group([inner["fc7_output"], fc1])},
        "no input": lambda: {"text": json_text.replace('"data"', '"image"')},
        "operator": lambda: {"text": json_text.replace("FullyConnected", "FullyConn")},
        "no symbol": lambda: {"text": json.dumps({"nodes": []})},
        "empty": lambda: {"text": ""},
        "lacking": lambda: {"arrays": {n: t for n, t in arrays.items() if n != "arg:conv0_weight"}},
        "shape": lambda: {"size": 32},
        "fp16": lambda: {"arrays": arrays | {"arg:bn0_beta": bn0.half()}},
        "names": lambda: {"arrays": {n[4:]: t for n, t in arrays.items()}},
    }[case]()
    with pytest.raises(ValueError, match=message) as error:
        read_network(*write(given["symbol"], given["arrays"], given["text"]), given["name"], given["size"])
    assert "net-" in str(error.value)
