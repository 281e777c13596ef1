"""`partial-fc export`: what is written computes the same in onnxruntime, and arcface_torch's names are right."""

import re

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

import partial_fc
from partial_fc import checkpoint, cli, models
from partial_fc.embedding.model import EmbeddingModel
from partial_fc.models.inputs import FACE, Pixels
from partial_fc.models.vectors import input_of
from scripts.test_wheel import Venv, find_python, run

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from partial_fc.verbs.model import onnx_model  # noqa: E402

SIZE, WIDTH = 32, 16


def trained(network: str = "tiny", to_input: Pixels = FACE) -> torch.nn.Module:
    """A network whose statistics are those of some batches, so that every layer counts."""
    torch.manual_seed(0)
    module = models.build(network, WIDTH, SIZE)
    for _ in range(3):
        module(to_input(pixels(16)))
    return module.eval()


def export(words: list[str]) -> int:
    try:
        return cli.run("export", words) or 0
    except SystemExit as ended:
        return int(str(ended.code))


def pixels(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8)


@pytest.mark.parametrize("name", [pytest.param("linear", marks=pytest.mark.long), "mlp:20"])
def test_a_network_of_vectors(tmp_path, name, monkeypatch, capsys):
    """As a run leaves it; the rest is refused, and a file that computes something else is not left."""
    facts = {"network": name, "embedding_size": "6", "input_size": "9", **input_of(9).facts(), "flip": "false"}
    checkpoint.save_tensors(models.build(name, 6, 9).state_dict(), tmp_path / "model.safetensors", facts)
    path, half = tmp_path / "m.onnx", tmp_path / "h.onnx"
    assert export([str(tmp_path / "model.safetensors"), "--onnx", str(path), "--onnx-fp16", str(half)]) == 0
    model = partial_fc.load(tmp_path / "model.safetensors")
    row_ND = model.examples(4)
    found = onnxruntime.InferenceSession(str(path)).run(["embedding"], {"input": row_ND.numpy()})[0]
    np.testing.assert_allclose(found, model.forward(row_ND).numpy(), rtol=1e-4, atol=1e-5)
    assert "8 random vectors in batches of 1, 5, 2" in capsys.readouterr().out
    assert export([str(tmp_path / "model.safetensors"), "--torch", str(tmp_path / "m.pt")]) == 1
    assert "by --onnx and --onnx-fp16 only" in capsys.readouterr().err
    monkeypatch.setattr(onnx_model, "forward_of", lambda path, contract: lambda row_ND: torch.randn(len(row_ND), 6))
    assert export([str(tmp_path / "model.safetensors"), "--onnx", str(tmp_path / "other.onnx")]) == 1
    assert "other.onnx is not written" in capsys.readouterr().err
    assert not list(tmp_path.glob("other.onnx*"))


@pytest.mark.parametrize(
    ("to_input", "first"),
    [
        pytest.param(FACE, [], marks=pytest.mark.long),
        (Pixels("blue first", (120.0, 110.0, 100.0), (58.0, 57.0, 56.0), bgr=True), ["Sub", "Mul"]),
    ],
)
def test_any_batch_gives_the_features_of_the_model(tmp_path, to_input, first):
    model = EmbeddingModel(trained(to_input=to_input), "tiny", WIDTH, SIZE, to_input=to_input, source=tmp_path)
    onnx_model.write(model, tmp_path / "m.onnx")
    forward = onnx_model.forward_of(tmp_path / "m.onnx", to_input)
    for count in (1, 5, 2):
        image = pixels(count)
        ours = model.forward(image)
        assert (forward(image) - ours).abs().max() < 1e-5 * ours.abs().max()

    proto = onnx.load(str(tmp_path / "m.onnx"))
    # InsightFace's ArcFaceONNX: nodes of these names among the first eight mean that it feeds pixels, 0 to 255; none,
    # that it feeds (pixel - 127.5) / 127.5.
    names = [node.name for node in proto.graph.node[:8]]
    assert [name for name in ("Sub", "Mul") if any(n.startswith(name) for n in names)] == first
    (given,), (out,) = proto.graph.input, proto.graph.output
    dims = [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim]
    assert (given.name, out.name, dims) == ("input", "embedding", ["N", 3, SIZE, SIZE])
    facts = {entry.key: entry.value for entry in proto.metadata_props}
    assert (facts["network"], facts["mean"], facts["flip"]) == ("tiny", "0.0" if first else "127.5", "true")


@pytest.mark.long
def test_a_smaller_file_and_what_it_costs(tmp_path, capsys):
    torch.save(trained().state_dict(), tmp_path / "backbone.pth")
    files = {kind: tmp_path / "out" / f"{kind}.onnx" for kind in ("onnx", "onnx-fp16")}
    flags = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    more = ["--image-size", str(SIZE), "--torch", str(tmp_path / "model.pt")]
    assert export([str(tmp_path / "backbone.pth"), *flags, *more]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"smallest cosine to the model's [01]\.\d+", printed)) == 2
    sizes = [path.stat().st_size for path in files.values()]
    assert sizes[0] > 1.5 * sizes[1]
    model = partial_fc.load(tmp_path / "model.pt", image_size=SIZE)
    image = pixels(4)
    found = onnx_model.forward_of(files["onnx-fp16"], FACE)(image)
    assert cosine_similarity(found, model.forward(image)).min() > 0.9999


OLDEST_RUNTIME = "1.14.1"  # of docs/after-training.md
RUN = """
import numpy, onnxruntime, sys
for file in sys.argv[1:]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    numpy.save(file + ".npy", session.run(None, {"input": numpy.load("x.npy")})[0])
print(onnxruntime.__version__)
"""


def test_files_are_of_an_old_format_and_pass_onnx_checker(tmp_path):
    """Of ONNX 1.13; operator sets that no node is of would need a newer runtime, too."""
    model = EmbeddingModel(trained("mini"), "mini", WIDTH, SIZE, source=tmp_path)
    paths = [tmp_path / f"{kind}.onnx" for kind in ("fp32", "fp16")]
    onnx_model.write(model, paths[0])
    onnx_model.write_fp16(paths[0], paths[1])
    for path in paths:
        proto = onnx.load(str(path))
        onnx.checker.check_model(proto, full_check=True)
        assert (proto.ir_version, [(each.domain, each.version) for each in proto.opset_import]) == (8, [("", 18)])


@pytest.mark.long
def test_the_oldest_runtime_gives_the_same_numbers(tmp_path):
    """In an environment with that onnxruntime, from pip's index; its newest Python is 3.10."""
    interpreter = find_python("3.10")
    if interpreter is None:
        pytest.skip("no Python 3.10 on this machine")
    venv = Venv(tmp_path / "venv", interpreter)
    venv.install(f"onnxruntime=={OLDEST_RUNTIME}", "numpy<2")
    torch.manual_seed(0)
    np.save(tmp_path / "x.npy", FACE(pixels(3)).numpy())
    for network in ("mini", "r18"):
        torch.save(trained(network).state_dict(), tmp_path / "backbone.pth")
        files = [f"{network}-{kind}.onnx" for kind in ("onnx", "onnx-fp16")]
        flags = [word for file in files for word in (f"--{file[len(network) + 1 : -5]}", str(tmp_path / file))]
        flags += ["--image-size", str(SIZE)]
        assert export([str(tmp_path / "backbone.pth"), *flags]) == 0
        assert OLDEST_RUNTIME in run(venv.python, "-c", RUN, *files, folder=tmp_path)
        for file in files:
            session = onnxruntime.InferenceSession(str(tmp_path / file))
            now = session.run(None, {"input": np.load(tmp_path / "x.npy")})[0]
            then = np.load(tmp_path / f"{file}.npy")
            assert cosine_similarity(torch.from_numpy(then), torch.from_numpy(now)).min() > 0.99
            np.testing.assert_allclose(then, now, atol=1e-3 * abs(now).max())
