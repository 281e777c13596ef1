"""`partial-fc convert`: backbones of MXNet's files, and of other programs', to ours."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc import models
from partial_fc.foreign import ndarray_file
from partial_fc.foreign.networks import Network
from recipes.mxnet import backbone_file as mxnet_backbone
from recipes.mxnet import symbol_file as mxnet_symbol
from recipes.mxnet.convert import ConvertOptions, convert
from recipes.mxnet.symbol_file import mxnet_names
from tests.recipes.mxnet.mxnet_network import recipe_symbol

SIZES = {"mini": (8, 40), "r18": (8, 32)}  # embedding, pixels


def trained(name: str) -> torch.nn.Module:
    """A backbone with statistics and slopes of its own; some variances are small, so that an epsilon shows."""
    torch.manual_seed(0)
    model = models.build(name, *SIZES[name])
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            torch.nn.init.normal_(module.running_mean, 0.0, 0.1)
            torch.nn.init.normal_(module.bias, 0.0, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.001, 0.01 if module is model.bn1 else 2.0)
            if module is not model.features:
                torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


def mxnet_files(folder: Path, name: str) -> tuple[Path, torch.nn.Module]:
    """What InsightFace's trainer would leave of that network: fc1_gamma is noise, as fix_gamma has it."""
    model = trained(name)
    names = mxnet_names(model)
    arrays = {names[name]: t for name, t in model.state_dict().items() if name in names}
    arrays["arg:fc1_gamma"] = torch.linspace(0.5, 1.5, SIZES[name][0])
    ndarray_file.write(folder / "model-0000.params", arrays)
    (folder / "model-symbol.json").write_text(recipe_symbol(model))
    return folder / "model-0000.params", model


@pytest.fixture
def without_mxnet(monkeypatch):
    """As if it were not installed: it must not be loaded into this process."""
    monkeypatch.setitem(sys.modules, "recipes.mxnet.library", None)


def test_every_array_has_a_name_of_its_own():
    """Arguments, auxiliary states and their numbers are those of InsightFace's own symbols."""
    sizes = {"r50": [238, 43_590_848, 158, 38_144], "r100": [463, 65_156_160, 308, 69_632]}
    for name in ("mini", "r18", "r50", "r100"):
        with torch.device("meta"):
            model = models.build(name)
        names, state = mxnet_names(model), model.state_dict()
        assert len(set(names.values())) == len(names) == sum("num_batches" not in n for n in state)
        kinds = [[state[ours].numel() for ours, its in names.items() if its[:3] == kind] for kind in ("arg", "aux")]
        assert sizes.get(name) in (None, [do(numbers) for numbers in kinds for do in (len, sum)])
    for ours, theirs in {
        "conv1.weight": "arg:conv0_weight",
        "prelu.weight": "arg:relu0_gamma",
        "bn2.running_var": "aux:bn1_moving_var",
        "fc.bias": "arg:pre_fc1_bias",
        "features.weight": "arg:fc1_gamma",
        "layer1.0.prelu.weight": "arg:stage1_unit1_relu1_gamma",
        "layer3.29.bn3.bias": "arg:stage3_unit30_bn3_beta",
        "layer2.0.downsample.0.weight": "arg:stage2_unit1_conv1sc_weight",
        "layer2.0.downsample.1.running_mean": "aux:stage2_unit1_sc_moving_mean",
    }.items():
        assert names[ours] == theirs


def test_there_and_back_is_the_same_network(tmp_path, without_mxnet, capsys):
    state = trained("mini").state_dict()
    torch.save({"state_dict_backbone": state, "epoch": 3}, tmp_path / "model.pt")
    for source, output in (("model.pt", "b.safetensors"), ("b.safetensors", "c.pt")):
        convert(ConvertOptions(tmp_path / source, tmp_path / output))
    again = torch.load(tmp_path / "c.pt")
    assert all(torch.equal(again[name], t) for name, t in state.items())
    params, _ = mxnet_files(tmp_path, "mini")
    capsys.readouterr()
    convert(ConvertOptions(params, tmp_path / "d.safetensors"))
    printed = capsys.readouterr().out
    assert printed.count("smallest cosine 1.00000000") == 1
    names = {"model.pt", "b.safetensors", "c.pt", "d.safetensors", "model-0000.params", "model-symbol.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_without_one_of_the_corrections_nothing_is_written(tmp_path, without_mxnet, monkeypatch):
    params, _ = mxnet_files(tmp_path, "r18")
    monkeypatch.setattr(mxnet_backbone, "_FACE_STD", 128.0)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"the embeddings differ: smallest cosine .*model.pt is not written"):
        convert(ConvertOptions(params, tmp_path / "model.pt"))
    assert sorted(tmp_path.iterdir()) == before


def test_the_symbol_says_epsilon_scale_and_fixed_gammas(tmp_path, without_mxnet, capsys):
    """Of a graph that is not the recipe's; without it the same arrays would be another network."""
    params, model = mxnet_files(tmp_path, "mini")
    (tmp_path / "other.json").write_text(recipe_symbol(model, "0.01", "0.001", ()))
    convert(ConvertOptions(params, tmp_path / "model.pt", symbol=tmp_path / "other.json"))
    assert "they are 1 already" in capsys.readouterr().out
    arrays, state = ndarray_file.read(params), torch.load(tmp_path / "model.pt")
    assert torch.equal(state["features.weight"], arrays["arg:fc1_gamma"])
    torch.testing.assert_close(state["conv1.weight"], arrays["arg:conv0_weight"] * 1.275)
    torch.testing.assert_close(state["bn1.running_var"], arrays["aux:bn0_moving_var"] + 0.00099)


def spoilt(**changed):
    """Changes arrays (None: away)."""

    def change(arrays):
        arrays.update(changed)
        return {name: t for name, t in arrays.items() if t is not None}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoilt(**{"arg:stage1_unit1_se_conv1_weight": torch.ones(1)}), "has squeeze-and-excitation units"),
        (spoilt(**{"arg:conv_1_conv2d_weight": torch.ones(1)}), "is a MobileFaceNet"),
        (spoilt(**{"arg:bn0_beta": None}), "does not fit this mini of MXNet: 1 missing: arg:bn0_beta"),
        (spoilt(**{"arg:bn0_beta": torch.ones(3)}), r"arg:bn0_beta is \(3,\), expected \(32,\)"),
        (spoilt(**{"arg:extra": torch.ones(3)}), "1 unexpected: arg:extra"),
        (spoilt(**{"arg:stage3_unit2_conv1_weight": torch.ones(3)}), "stages of 1-2-2 blocks"),
        (spoilt(**{"arg:pre_fc1_weight": None}), "has no fc.weight or arg:pre_fc1_weight"),
    ],
)
def test_other_networks_and_broken_ones_are_named(tmp_path, without_mxnet, change, message):
    params, _ = mxnet_files(tmp_path, "mini")
    ndarray_file.write(tmp_path / "x-0000.params", change(ndarray_file.read(params)))
    with pytest.raises(ValueError, match=rf"x-0000.params.*{message}"):
        convert(ConvertOptions(tmp_path / "x-0000.params", tmp_path / "model.pt"))
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("source", "output", "message"),
    [
        ("x.params", "x.pt", "expected PREFIX-0000.params"),
        ("model.pt", "x-0000.params", "x-0000.params: unknown file type; expected .safetensors"),
        ("model.pt", "x.onnx", "x.onnx"),
        ("model.pt", "folder", "folder: "),
        ("model.pt", "model.pt", "model.pt exists"),
        ("mbf.pt", "b.safetensors", "mbf.pt is a MobileFaceNet"),
        ("untrained.pt", "b.safetensors", "torch gives NaN or Inf"),
        ("list.pt", "b.safetensors", r"list.pt: expected a state dict \(name -> tensor\)"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path, without_mxnet, source, output, message):
    state = trained("mini").state_dict()
    torch.save(state, tmp_path / "model.pt")
    torch.save(models.build("mbf", 8, 32).state_dict(), tmp_path / "mbf.pt")
    torch.save(state | {"bn1.bias": torch.full((32,), 1e38)}, tmp_path / "untrained.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=message):
        convert(ConvertOptions(tmp_path / source, tmp_path / output))
    assert not list(tmp_path.glob("b.*"))


def node(op: str, name: str, *inputs: int, **attrs: str) -> dict:
    return {"op": op, "name": name, "attrs": attrs, "inputs": [[number, 0, 0] for number in inputs]}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "no Convolution 'conv0'"),
        ({"op": "null"}, "is no symbol of MXNet"),
        ([node("null", "data"), node("BatchNorm", "bn_data", 0)], "BatchNorm 'bn_data' lies before conv0"),
        ([node("null", "data"), node("_mul_scalar", "m", 0, scalar="0.1")], r"pixel \* 0.1 \+ 0; expected"),
        ([node("null", "data"), node("_div_scalar", "m", 0, scalar="0")], "is no symbol of MXNet"),
        ([node("null", "data"), node("_minus_scalar", "m", 0)], "expected"),
        ([node("null", "data"), node("_copy", "m", 1)], "is no symbol of MXNet"),
    ],
)
def test_graphs_that_begin_in_another_way_are_refused(tmp_path, nodes, message):
    if nodes and isinstance(nodes, list):
        nodes += [node("Convolution", "conv0", 1), node("BatchNorm", "fc1", 2)]
    (tmp_path / "x.json").write_text(json.dumps({"nodes": nodes}))
    with pytest.raises(ValueError, match=rf"x.json.*{message}"):
        mxnet_symbol.read(tmp_path / "x.json")


@pytest.mark.mxnet
@pytest.mark.parametrize("name", SIZES)
def test_mxnet_itself_gives_the_same_embeddings(mx, tmp_path, name):
    """Of our files and of its own, whose symbol has the label beside the embedding, as InsightFace's trainer saves."""
    params, model = mxnet_files(tmp_path, name)
    embedding = mx.sym.load(str(tmp_path / "model-symbol.json"))
    names = list(mxnet_names(model).values())
    assert sorted(f"arg:{a}" for a in embedding.list_arguments() if a != "data") == sorted(
        n for n in names if n[1] == "r"
    )
    arg = {n[4:]: mx.nd.array(t.numpy()) for n, t in ndarray_file.read(params).items() if n.startswith("arg")}
    aux = {n[4:]: mx.nd.array(t.numpy()) for n, t in ndarray_file.read(params).items() if n.startswith("aux")}
    both = mx.sym.Group([embedding, mx.sym.BlockGrad(mx.sym.Variable("softmax_label"))])
    mx.model.save_checkpoint(str(tmp_path / "theirs"), 0, both, arg, aux)

    convert(ConvertOptions(tmp_path / "theirs-0000.params", tmp_path / "model.safetensors"))
    image_B3HW = torch.randint(0, 256, (4, 3, SIZES[name][1], SIZES[name][1]), dtype=torch.uint8)
    module = mx.mod.Module(embedding, label_names=None)
    module.bind([("data", tuple(image_B3HW.shape))], for_training=False)
    module.set_params(arg, aux)
    module.forward(mx.io.DataBatch([mx.nd.array(image_B3HW.numpy())]), is_train=False)
    theirs_BD = torch.from_numpy(module.get_outputs()[0].asnumpy()).double()
    ours_BD = mxnet_backbone.embed(load_file(tmp_path / "model.safetensors"), Network(name, *SIZES[name]), image_B3HW)
    assert torch.nn.functional.cosine_similarity(ours_BD, theirs_BD).min() > 1 - 1e-8
