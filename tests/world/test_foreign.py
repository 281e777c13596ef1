"""Checkpoints of other programs: which are read, with the embeddings that their own network gives, and what is said of
the rest. The networks of AdaFace and face.evoLVe are written here once more, from their published description."""

import argparse
import collections
import enum
import functools
import json
import pathlib
import pickle
import types
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import partial_fc
from partial_fc import models
from partial_fc.foreign.state_dicts import load_state, load_torch, read_weights
from partial_fc.models.iresnet import IResNet
from recipes.face.backbone import ModelFlags, build
from recipes.mxnet.convert import ConvertOptions, convert
from tests.world.rows import Row, table

D, SIZE = 8, 32
WIDTHS = (8, 12, 16, 20)  # narrower than they are published


def lively(module: nn.Module) -> nn.Module:
    """With statistics and slopes of its own, so that every layer and its place count."""
    torch.manual_seed(0)
    for name, t in module.state_dict().items():
        if t.is_floating_point() and t.dim() == 1:
            is_scale = name.endswith(("weight", "var"))
            t.copy_(torch.rand(t.shape) + 0.5 if is_scale else torch.randn(t.shape) / 5)
    return module.eval()


@functools.cache
def tiny() -> nn.Module:
    return lively(models.build("tiny", D, SIZE))


# ---- IR networks


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, kind: str):
        super().__init__()
        self.shortcut_layer: nn.Module = nn.MaxPool2d(1, stride)
        if width_in != width:
            self.shortcut_layer = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        norm = [nn.BatchNorm2d(width)] if kind == "adaface" else []
        layers = [nn.BatchNorm2d(width_in), nn.Conv2d(width_in, width, 3, 1, 1, bias=False), *norm, nn.PReLU(width)]
        layers += [nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]
        if kind == "se":
            layers.append(nn.ModuleDict({"fc1": nn.Conv2d(width, 4, 1), "fc2": nn.Conv2d(4, width, 1)}))  # type: ignore[arg-type]
        self.res_layer = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.res_layer(x) + self.shortcut_layer(x)


class IR(nn.Module):
    """IR-18. kind: "adaface", "evolve" or "se". affine: of the last batch norm. widths: of the four stages."""

    def __init__(self, kind: str, affine: bool, widths: tuple[int, ...] = WIDTHS):
        super().__init__()
        first, last = widths[0], widths[-1]
        self.input_layer = nn.Sequential(
            nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first), nn.PReLU(first)
        )
        blocks = [(before, width) for before, width in zip((first, *widths), widths, strict=False)]
        pairs = [pair for before, width in blocks for pair in ((before, width, 2), (width, width, 1))]
        self.body = nn.Sequential(*[Block(before, width, stride, kind) for before, width, stride in pairs])
        end = [nn.Linear(last * (SIZE // 16) ** 2, D), nn.BatchNorm1d(D, affine=affine)]
        self.output_layer = nn.Sequential(nn.BatchNorm2d(last), nn.Dropout(0.4), nn.Flatten(), *end)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.body(self.input_layer(x)))


def under_net(state: dict) -> dict:
    return {f"net.{name}": t for name, t in state.items()}


def adaface(state: dict) -> dict:
    return {"state_dict": {f"model.{name}": t for name, t in state.items()} | {"head.kernel": torch.randn(D, 5)}}


@table(
    [
        Row("AdaFace's .ckpt", "AdaFace 144, its train_val.py", ("adaface", False, adaface, "a.ckpt"), "BGR"),
        Row("AdaFace's weights alone", "its inference.py, saved again", ("adaface", False, dict, "a.pt"), "RGB"),
        Row("CVLFace's model.pt", "CVLFace", ("adaface", False, under_net, "model.pt"), "RGB"),
        Row("face.evoLVe's .pth", "backbone_ir50_*.pth", ("evolve", True, dict, "backbone_ir50.pth"), "RGB"),
        Row("face.evoLVe's without affine", "its later versions", ("evolve", False, dict, "backbone_ir50.pth"), "RGB"),
        Row("with squeeze-and-excitation", "backbone_ir_se50", ("se", True, dict, "a.pth"), "IR-SE"),
    ]
)  # fmt: skip
def test_ir_networks(tmp_path, row):
    kind, affine, wrap, name = row.given
    theirs = lively(IR(kind, affine))
    torch.save(wrap(theirs.state_dict()), tmp_path / name)
    if kind == "se":
        with pytest.raises(ValueError, match=row.right):
            partial_fc.load(tmp_path / name)
        return
    weights, facts = read_weights(tmp_path / name)
    ours = IResNet((2, 2, 2, 2), D, SIZE, widths=WIDTHS).eval()
    load_state(ours, weights, tmp_path / name)
    value = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(value.flip(1) if row.right == "BGR" else value)
        torch.testing.assert_close(ours(value), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert row.right in facts["note"]


def test_a_bottleneck_of_adafaces_ir152_is_named(tmp_path):
    state = IR("adaface", False).state_dict()
    torch.save(state | {f"body.0.res_layer.{n}.weight": torch.ones(8) for n in (6, 7, 8)}, tmp_path / "ir152.ckpt")
    with pytest.raises(ValueError, match=r"body\.0 has 9 layers; .*bottleneck"):
        partial_fc.load(tmp_path / "ir152.ckpt")


@table(
    [
        Row("another width", "insightface 2675", lambda: models.build("tiny", 2 * D, SIZE), "number of outputs"),
        Row("another image size", "arcface_torch at 224", lambda: models.build("tiny", D, 2 * SIZE), "image size"),
        Row("another network", "a wrong flag", lambda: models.build("mini", D, SIZE), r"another network, .* \d+ of"),
        Row("other names", "torchvision", lambda: nn.Sequential(nn.Linear(2, 2)), "It is another network$"),
        Row("classes", "a head for others", lambda: nn.Linear(3, 4), "another network$"),
    ]
)
def test_why_weights_do_not_fit(row):
    weights = row.given().state_dict()
    with pytest.raises(ValueError, match=rf"a\.pt does not fit .*{row.right}"):
        load_state(tiny(), weights, pathlib.Path("a.pt"))


def test_weights_of_integers_are_named():
    weights = {name: t.int() for name, t in tiny().state_dict().items()}
    with pytest.raises(ValueError, match=r"integers.*float32"):
        load_state(tiny(), weights, pathlib.Path("a.pt"))


@table(
    [
        Row("a name without an ending", "mlflow", "weights", None),
        Row("a picture", "the arguments in another order", "a.png", "it is a PNG picture"),
        Row("a run's folder", "its path in place of its model's", "run", "it is a folder"),
        Row("MXNet's under another name", "gluon's save_parameters", "net.bin", r"rename it PREFIX-0000\.params"),
    ]
)
def test_what_convert_reads(tmp_path, row):
    path = tmp_path / row.given
    if row.right is None:
        torch.save(tiny().state_dict(), path)
    elif path.suffix == "":
        path.mkdir()
    else:
        path.write_bytes({".png": b"\x89PNG\r\n\x1a\n", ".bin": b"\x12\x01" + bytes(30)}[path.suffix])
    if row.right:
        with pytest.raises(ValueError, match=row.right):
            convert(ConvertOptions(path, tmp_path / "model.safetensors"))
        return
    convert(ConvertOptions(path, tmp_path / "model.safetensors", image_size=SIZE))
    assert partial_fc.load(tmp_path / "model.safetensors").name == "tiny"


# ---- files of torch.save with other objects


class Colour(enum.Enum):
    RED = 1


class Attributes(dict):
    """A dictionary with attributes, as EasyDict and many a configuration."""

    def __init__(self, **items: object):
        super().__init__(**items)
        self.__dict__.update(items)


class Rows(list):
    pass


class Slots:
    __slots__ = ("a",)


class Config:
    """As OmegaConf's: its state holds others of its kind."""

    def __init__(self, depth: int = 2):
        self.content = {"inner": Config(depth - 1)} if depth else {}


class Runs:
    """Pickled as a call."""

    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


class Made:
    """Pickled as a call of something harmless to others."""

    def __reduce__(self):
        return types.SimpleNamespace, ()


def with_slots() -> Slots:
    made = Slots()
    made.a = 3
    return made


@table(
    [
        Row("argparse.Namespace", "Lightning 20058", lambda: argparse.Namespace(lr=0.1), "lr"),
        Row("pathlib.Path", "Lightning, chemprop 1227", lambda: pathlib.Path("/data"), None),
        Row("nested configuration", "OmegaConf in Lightning and Hydra", Config, None),
        Row("dictionary with attributes", "EasyDict, AttributeDict", lambda: Attributes(a=1, b=Attributes()), None),
        Row("list of its own class", "many a configuration", lambda: Rows([1, 2]), None),
        Row("class with slots", "dataclasses", with_slots, None),
        Row("functools.partial", "matgl PR 802", lambda: functools.partial(max, 3, key=len), None),
        Row("numpy scalars and arrays", "metrics", lambda: [np.float32(3), np.int64(2), np.zeros(3)], None),
        Row("torch dtypes and devices", "trainers' settings", lambda: [torch.float32, torch.device("cpu")], None),
        Row("enumeration as a key", "timm, trainers' phases", lambda: {Colour.RED: 1, pathlib.Path("/"): 2}, None),
        Row("sets and deques", "meters of losses", lambda: [{pathlib.Path("/")}, collections.deque([1.0], 3)], None),
        Row("functions and classes", "loss functions", lambda: [len, np.mean, Slots, exec], None),
        Row("a call", "an attack", Runs, None),
        Row("a call of another class", "reduce functions", Made, None),
    ]
)  # fmt: skip
def test_of_a_checkpoint_only_tensors_are_read(tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    state = {f"backbone.{name}": t for name, t in tiny().state_dict().items()} | {"head.weight": torch.zeros(3, D)}
    content = {"state_dict": state, "hyper_parameters": {"thing": row.given()}, "epoch": 3}
    torch.save(content, "last.ckpt")
    model = partial_fc.load("last.ckpt", image_size=SIZE)
    assert all(torch.equal(t, tiny().state_dict()[name]) for name, t in model.network.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"], "something ran"
    found = load_torch("last.ckpt")["hyper_parameters"]["thing"]
    assert type(found).__module__ in ("builtins", "partial_fc.foreign.unknown_classes")
    if row.right:
        assert found.content == {"lr": 0.1}


def test_the_format_before_torch_1_6(tmp_path):
    content = {"state_dict": tiny().state_dict(), "args": argparse.Namespace(out=pathlib.Path("/runs"))}
    torch.save(content, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert partial_fc.load(tmp_path / "old.pth", image_size=SIZE).name == "tiny"


@table(
    [
        Row("a whole module", "torch.save(model)", lambda net: net, None),
        Row("a whole module in a checkpoint", "ultralytics", lambda net: {"model": net, "ema": net}, None),
        Row("a whole DataParallel", "torch.save(model)", nn.DataParallel, None),
        Row("Hugging Face's pytorch_model.bin", "transformers", lambda net: net.state_dict(), "pytorch_model.bin"),
        Row("a .pth.tar", "torchvision's example", lambda net: {"state_dict": net.state_dict()}, "best.pth.tar"),
    ]
)
def test_files_of_torch_save_under_any_name(tmp_path, row):
    path = tmp_path / (row.right or "model.pt")
    torch.save(row.given(tiny()), path)
    model = partial_fc.load(path, image_size=SIZE)
    assert all(torch.equal(t, tiny().state_dict()[name]) for name, t in model.network.state_dict().items())


def script(path: pathlib.Path) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save(str(path))


def in_folder(*names: str):
    def make(path: pathlib.Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"x")

    return make


def content(*parts: bytes):
    return lambda path: path.write_bytes(b"".join(parts) + bytes(600))


@table(
    [
        Row("TorchScript", "torch.jit.save", ("net.pt", script), "TorchScript"),
        Row("newer pickle", "torch.save(pickle_protocol=4)",
            ("a.pt", lambda path: torch.save(tiny().state_dict(), path, pickle_protocol=4)), "pickle_protocol"),
        Row("only a value", "torch.save(args)", ("a.pt", lambda path: torch.save(argparse.Namespace(a=1), path)),
            r"argparse\.Namespace.*torch\.save\(model\.state_dict"),
        Row("a pickle", "pickle.dump", ("a.pt", lambda path: path.write_bytes(pickle.dumps(print, protocol=2))),
            "a pickle, none of torch.save"),
        Row("a checkpoint without weights", "torch.save of an emptied state",
            ("a.pt", lambda path: torch.save({"model": {}, "epoch": 3}, path)), "a state dict"),
        Row("HDF5 as .pt", "Keras, renamed", ("a.pt", content(b"\x89HDF\r\n\x1a\n")), "HDF5"),
        Row("Keras", "model.save", ("a.h5", content(b"\x89HDF\r\n\x1a\n")), "Keras.*ONNX"),
        Row("TensorFlow Lite", "MobileFaceNet.tflite", ("a.tflite", content(b"\x1c\0\0\0TFL3")), "TensorFlow.*ONNX"),
        Row("TensorRT", "trtexec", ("a.engine", content(b"ftrt")), "TensorRT"),
        Row("MXNet", "model-0000.params", ("model-0000.params", content(b"\x12\x01\0\0\0\0\0\0")), "convert"),
        Row("a login page", "a download without a token", ("a.ckpt", lambda path: path.write_text("<html>")), "HTML"),
        Row("Git LFS", "git clone without lfs",
            ("a.pt", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n")), "LFS"),
        Row("a picture", "the arguments in another order", ("a.png", content(b"\x89PNG\r\n\x1a\n")), "PNG"),
        Row("DeepSpeed", "global_step100", ("run", in_folder("latest", "global_step100/mp_rank_00_model_states.pt")),
            "DeepSpeed.*zero_to_fp32"),
        Row("FSDP", "torch.distributed.checkpoint", ("run", in_folder(".metadata", "__0_0.distcp")), "dcp_to_torch"),
        Row("sharded safetensors", "save_pretrained",
            ("model.safetensors.index.json", lambda path: path.write_text(json.dumps({"weight_map": {}}))), "index"),
        Row("TensorFlow's folder", "saved_model", ("run", in_folder("saved_model.pb")), "TensorFlow"),
    ]
)  # fmt: skip
def test_other_files_are_named_with_what_can_be_done(tmp_path, row):
    name, make = row.given
    make(tmp_path / name)
    with pytest.raises(ValueError, match=rf"(?s){name}.*{row.right}"):
        partial_fc.load(tmp_path / name)


def test_a_file_that_asks_for_the_system_is_refused(tmp_path):
    torch.save({"state_dict": tiny().state_dict(), "f": __import__("os").system}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt .*\bsystem\b"):
        partial_fc.load(tmp_path / "a.pt")


def test_safetensors_under_another_name(tmp_path):
    save_file(tiny().state_dict(), tmp_path / "weights.bin")
    assert partial_fc.load(tmp_path / "weights.bin", image_size=SIZE).name == "tiny"


# ---- ONNX


def exported(network: nn.Module, path: pathlib.Path, opset: int, size: int = SIZE) -> None:
    """As arcface_torch's torch2onnx.py and other scripts: by torch's older exporter, which folds and renames."""
    image = torch.zeros(1, 3, size, size)
    torch.onnx.export(network, (image,), str(path), input_names=["input.1"], dynamo=False, opset_version=opset)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Any:
    """The network `tiny`, exported once."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    exported(tiny(), path, 11)
    return onnx.load(str(path))


def unchanged(graph: Any) -> None:
    pass


def scaled_as_mxnet(graph: Any) -> None:
    """Puts MXNet's scaling before the first convolution, which takes the place of the caller's."""
    from onnx import helper, numpy_helper

    first = next(node for node in graph.node if node.op_type == "Conv")
    for name, value in (("mean", 127.5), ("factor", 1 / 128)):
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    scaling = [helper.make_node("Sub", [first.input[0], "mean"], ["centred"])]
    scaling.append(helper.make_node("Mul", ["centred", "factor"], ["scaled"]))
    first.input[0] = "scaled"
    nodes = [*scaling, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def rewired(graph: Any) -> None:
    """Adds another layer's output in one place, of equal shape."""
    first, second = [node for node in graph.node if node.op_type == "Add"][:2]
    second.input[1] = first.input[0]


def in_8_bits(graph: Any) -> None:
    for node in graph.node:
        node.op_type = {"Conv": "QLinearConv"}.get(node.op_type, node.op_type)


@table(
    [
        Row("an iresnet", "insightface 2855: buffalo_l's w600k_r50.onnx", unchanged, "tiny"),
        Row("scaling in the graph", "arcface_r100_v1.onnx, from MXNet", scaled_as_mxnet, "tiny"),
    ]
)
def test_networks_published_as_onnx(tmp_path, published, row):
    import onnx
    import onnxruntime

    proto = onnx.ModelProto.FromString(published.SerializeToString())
    row.given(proto.graph)
    path = tmp_path / "w600k.onnx"
    onnx.save(proto, str(path))
    model = partial_fc.load(path)
    image = torch.randint(0, 256, (1, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    given = image.float() if row.given is scaled_as_mxnet else (image.float() - 127.5) / 127.5
    expected = onnxruntime.InferenceSession(str(path)).run(None, {"input.1": given.numpy()})[0]
    np.testing.assert_allclose(model.forward(image), expected, rtol=0, atol=2e-5 * abs(expected).max())
    assert (model.name, model.image_size, model.embedding_size) == (row.right, SIZE, D)
    if row.given is unchanged:
        convert(ConvertOptions(path, tmp_path / "model.pt"))
        again = partial_fc.load(tmp_path / "model.pt", image_size=SIZE)
        assert torch.equal(again.forward(image), model.forward(image))
        built = build(ModelFlags(network="tiny", embedding_size=D, pretrained=path), SIZE, torch.device("cpu"))
        assert "folded" in " ".join(built.notes)
        assert all(torch.equal(t, model.network.state_dict()[name]) for name, t in built.module.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [pytest.param("r18", 32, marks=pytest.mark.long), ("mbf", 64)])
def test_networks_of_published_widths(tmp_path, name, size):
    runtime, path = pytest.importorskip("onnxruntime"), tmp_path / f"w600k_{name}.onnx"
    exported(lively(models.build(name, D, size)), path, 11, size)
    model = partial_fc.load(path)
    image = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8)
    expected = runtime.InferenceSession(str(path)).run(None, {"input.1": ((image.float() - 127.5) / 127.5).numpy()})[0]
    np.testing.assert_allclose(model.forward(image), expected, rtol=0, atol=2e-5 * abs(expected).max())
    assert (model.name, model.image_size, model.embedding_size) == (name, size, D)


@table(
    [
        Row("other wiring, equal layers", "a variant", rewired, r"pytorch.*input\.1 \(1, 3, 32, 32\).*vectors"),
        Row("8 bits", "onnxruntime's quantize", in_8_bits, "QLinearConv 11.*fp32"),
    ]
)
def test_other_onnx_files_are_described(tmp_path, published, row):
    import onnx

    proto = onnx.ModelProto.FromString(published.SerializeToString())
    row.given(proto.graph)
    onnx.save(proto, str(tmp_path / "net.onnx"))
    with pytest.raises(ValueError, match=rf"(?s)net\.onnx is an ONNX model.*{row.right}"):
        partial_fc.load(tmp_path / "net.onnx")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    (tmp_path / "a.onnx").write_bytes(b"\x08\x06\x12\x07pytorch")
    with pytest.raises(ValueError, match=r"needs the package onnx .*pip install"):
        partial_fc.load(tmp_path / "a.onnx")
