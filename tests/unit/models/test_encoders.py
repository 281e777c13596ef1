"""timm's networks and functions in files: what builds them, what is refused, and how they load after training."""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import partial_fc
from partial_fc import models
from partial_fc.flags import OptimFlags, ScheduleFlags
from partial_fc.models import encoders
from recipes.face.backbone import ModelFlags, build, rate_notes

SIZE, WIDTH = 32, 16
SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
from partial_fc.models.inputs import Pixels

@dataclass
class Shape:
    width: int

class Net(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.fc = nn.Linear(3 * size * size, width)
        self.to_input = Pixels("pixel / 255", 0.0, 255.0)

    def forward(self, x):
        return self.fc(x.flatten(1))

def make(embedding_size, image_size):
    return Net(embedding_size, image_size)

def narrow(embedding_size, image_size):
    return Net(embedding_size - 1, image_size)

def two(embedding_size, image_size):
    return 2

def wrong(embedding_size, image_size):
    return nn.Linear(7, embedding_size)
"""


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "enc.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def timm():
    return pytest.importorskip("timm")


def delivered(path, module, name, size=SIZE, width=WIDTH):
    facts = {"network": name, "embedding_size": str(width), "image_size": str(size), "flip": "true"}
    weights = {name: t.contiguous() for name, t in module.state_dict().items()}
    save_file(weights, path, metadata={**facts, **encoders.input_of(module).facts()})


# ---- a function in a file


def test_a_function_in_a_file_is_trained_and_loaded_with_trust_alone(code, tmp_path):
    network = build(ModelFlags(network=f"{code}:make", embedding_size=WIDTH), SIZE, torch.device("cpu"))
    assert network.code == code
    assert network.contract["network"] == "enc.py:make"
    assert network.to_input.std == 255.0
    run = tmp_path / "run"
    run.mkdir()
    delivered(run / "model.safetensors", network.module, "enc.py:make")
    with pytest.raises(ValueError, match=r"built by enc.py:make; expected enc.py beside it"):
        partial_fc.load(run, trust_code=True)
    (run / "enc.py").write_text(SOURCE)
    with pytest.raises(ValueError, match=r"run/enc.py, whose code would be executed.*--trust-code"):
        partial_fc.load(run)
    found = partial_fc.load(run, trust_code=True)
    image = torch.randint(0, 256, (3, 3, SIZE, SIZE), dtype=torch.uint8)
    assert torch.equal(found.forward(image), network.module.eval()(image / 255.0))
    assert found.facts()["network"] == "enc.py:make"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("narrow", r"returns \(2, 15\); expected \(2, 16\), by --embedding-size"),
        ("two", "two returns a int; expected a torch.nn.Module"),
        ("wrong", "does not take images of 32 pixels"),
        ("missing", "has no missing; it has .*make"),
    ],
)
def test_a_function_that_gives_no_encoder_is_named(code, function, says):
    with pytest.raises(ValueError, match=says) as error:
        models.build(f"{code}:{function}", WIDTH, SIZE)
    assert f"--network {code}:{function}" in str(error.value)


def test_a_file_that_cannot_be_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*none.py"):
        ModelFlags(network=f"{tmp_path}/none.py:make")
    (tmp_path / "bad.py").write_text("def make(:\n")
    with pytest.raises(ValueError, match=r"bad.py cannot be run"):
        models.build(f"{tmp_path}/bad.py:make", WIDTH, SIZE)


# ---- timm


@pytest.mark.parametrize("width", [WIDTH, 192])
def test_a_network_of_timm_goes_from_flags_to_load(timm, tmp_path, width):
    name = "timm:vit_tiny_patch16_224"
    torch.manual_seed(0)
    network = build(ModelFlags(network=name, embedding_size=width), SIZE, torch.device("cpu"))
    assert isinstance(network.module.head, encoders.OutputLinear if width == WIDTH else nn.Identity)
    assert network.to_input.mean == 127.5
    assert any("published for 224 x 224 pixels, resized bicubic" in note for note in network.notes)
    delivered(tmp_path / "model.safetensors", network.module, name, width=width)
    before = torch.get_rng_state()
    found = partial_fc.load(tmp_path / "model.safetensors")
    assert torch.equal(torch.get_rng_state(), before)
    image = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    torch.testing.assert_close(found.forward(image), network.module.eval()((image - 127.5) / 127.5))
    started = build(
        ModelFlags(network=name, embedding_size=width, pretrained=tmp_path / "model.safetensors"),
        SIZE, torch.device("cpu"),
    )  # fmt: skip
    assert all(torch.equal(t, network.module.state_dict()[key]) for key, t in started.module.state_dict().items())


def test_the_input_of_a_convolutional_network_of_timm(timm):
    network = build(ModelFlags(network="timm:resnet10t", embedding_size=WIDTH), SIZE, torch.device("cpu"))
    assert network.to_input.mean == (123.675, 116.28, 103.53)
    with torch.autocast("cpu", torch.bfloat16):
        assert network.module(torch.zeros(2, 3, SIZE, SIZE)).dtype == torch.float32
    assert network.module.fc in models.keeps_fp32(network.module)


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("vit_tiny_patch16_244", 32, "near ones: vit_tiny_patch16_224"),
        ("vit_tiny_patch16_224", 10, "vit_tiny_patch16_224 .*10"),
    ],
)
def test_what_timm_cannot_build_is_named(timm, name, size, says):
    with pytest.raises(ValueError, match=says):
        models.build(f"timm:{name}", WIDTH, size)


def test_a_model_of_a_file_starts_the_same_network_without_trust_and_no_other(code, tmp_path):
    weights = models.build(f"{code}:make", WIDTH, SIZE)
    delivered(tmp_path / "model.safetensors", weights, "enc.py:make")
    flags = {"embedding_size": WIDTH, "pretrained": tmp_path / "model.safetensors"}
    started = build(ModelFlags(network=f"{code}:make", **flags), SIZE, torch.device("cpu"))
    assert torch.equal(started.module.fc.weight, weights.fc.weight)
    with pytest.raises(ValueError, match=r"takes pixel / 255"):
        build(ModelFlags(network="tiny", **flags), SIZE, torch.device("cpu"))
    delivered(tmp_path / "model.safetensors", models.build("tiny", WIDTH, SIZE), "enc.py:make")
    with pytest.raises(ValueError, match=r"is a backbone enc.py:make; this run has tiny"):
        build(ModelFlags(network="tiny", **flags), SIZE, torch.device("cpu"))


# ---- a transformer's learning rate


@pytest.mark.parametrize(
    ("network", "words", "noted"),
    [
        ("vit_t", {}, "--optimizer sgd at learning rate 0.2: .*docs/encoders.md"),
        ("vit_t", {"optimizer": "adamw", "lr": 1e-3}, "adamw at learning rate 0.002"),
        ("vit_t", {"optimizer": "adamw", "lr": 1e-3, "lr_scaling": "none"}, None),
        ("tiny", {}, None),
    ],
)
def test_a_transformer_at_a_rate_that_is_known_to_diverge_is_noted(network, words, noted):
    words = {"optimizer": "sgd", "lr": 0.1, "lr_scaling": "linear", **words}
    module = models.build(network, WIDTH, SIZE)
    optim = OptimFlags(optimizer=words.pop("optimizer"))
    notes = list(rate_notes(module, optim, ScheduleFlags(**words), global_batch=1024))
    assert len(notes) == (noted is not None)
    assert not noted or re.search(noted, notes[0])
