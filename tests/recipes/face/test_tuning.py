"""Fine-tuning as its users start it: a moving average of the weights, adapters, and a teacher."""

import importlib.util

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import partial_fc
from tests.running import losses, result, same_tensors, train_here, train_several

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
EVERY_STEP = "--checkpoint-every 1 --keep-checkpoints 99"
FLAGS = "--val-targets --check-data off --batch-size 16 --lr-scheduler constant --warmup-steps 1"


@pytest.fixture(scope="module")
def pretrained(glyphs, tmp_path_factory):
    """A run's folder, of a network that has learned something."""
    root = tmp_path_factory.mktemp("pretrained")
    train_here(root, f"--dataset glyphs --rec {glyphs} {FLAGS} --max-steps 30")
    return root


def step(root, number: int):
    return root / f"checkpoints/step-{number:08d}"


def stored(root, number: int, form: str = "") -> dict[str, torch.Tensor]:
    """The backbone of a checkpoint; form: what the optimizer's file has of another one, NAME/raw or NAME/ema."""
    if not form:
        return load_file(step(root, number) / "backbone.safetensors")
    found = load_file(step(root, number) / "optimizer.safetensors")
    return {name.removesuffix(f"/{form}"): t for name, t in found.items() if name.endswith(f"/{form}")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


# ---- --ema


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "fp16-o2"])
def test_the_average_is_that_of_the_weights_after_each_step(glyphs, tmp_path, precision):
    flags = f"--dataset glyphs --rec {glyphs} {FLAGS} --max-steps 6 --precision {precision} {EVERY_STEP}"
    log = train_here(tmp_path / "ema", f"{flags} --ema 0.8")
    assert "model-raw.safetensors the raw ones" in log
    assert "after the 6 steps of this run 26% of the average" in log
    train_here(tmp_path / "plain", flags)
    assert losses(tmp_path / "ema") == losses(tmp_path / "plain")
    average = {name: t.double() for name, t in stored(tmp_path / "ema", 1).items() if t.is_floating_point()}
    assert any(name.endswith("running_var") for name in average)
    for number in range(2, 7):
        raw, now = stored(tmp_path / "plain", number), stored(tmp_path / "ema", number)
        average = {name: 0.8 * t + 0.2 * raw[name].double() for name, t in average.items()}
        for name, t in average.items():
            torch.testing.assert_close(now[name].double(), t, rtol=1e-5, atol=1e-7)
    delivered, beside = (load_file(tmp_path / f"ema/{name}.safetensors") for name in ("model", "model-raw"))
    assert same(delivered, stored(tmp_path / "ema", 6))
    assert same(beside, stored(tmp_path / "plain", 6))
    assert not torch.equal(delivered["fc.weight"], beside["fc.weight"])
    for name in ("model", "model-raw"):
        assert partial_fc.load(tmp_path / f"ema/{name}.safetensors").embedding_size == 32
    assert same(partial_fc.load(step(tmp_path / "ema", 6)).network.state_dict(), delivered)


@pytest.mark.long
def test_the_average_is_what_is_evaluated(glyphs, tmp_path):
    flags = f"--dataset glyphs --rec {glyphs} {FLAGS} --val-targets unseen --max-steps 8 --verbose 4"
    for name, more in {"ema": "--ema 0.9", "plain": ""}.items():
        train_here(tmp_path / name, f"{flags} {more}")
    assert losses(tmp_path / "ema") == losses(tmp_path / "plain")  # evaluating changes nothing
    scores = [result(tmp_path / name)["evaluations"]["unseen/accuracy"] for name in ("ema", "plain")]
    assert scores[0] != scores[1]


def test_an_average_resumes_bit_by_bit(glyphs, tmp_path):
    """On two ranks, whose running statistics differ."""
    flags = f"--dataset glyphs --rec {glyphs} {FLAGS} --ema 0.9 --max-steps"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_several({whole: f"{flags} 6", parts: f"{flags} 3"})
    train_several({parts: f"{flags} 6"})
    same_tensors(step(whole, 6), step(parts, 6))
    assert same_tensors(whole, parts) == 2  # the average and the raw ones


def test_an_average_begins_and_ends_with_a_resumed_run(glyphs, tmp_path):
    flags = f"--dataset glyphs --rec {glyphs} {FLAGS} --max-steps"
    train_here(tmp_path / "run", f"{flags} 2")
    log = train_here(tmp_path / "run", f"{flags} 3 --ema 0.75")
    assert "has no average of the weights: --ema 0.75 starts from its weights" in log
    assert "was trained with --ema 0.0, this run has 0.75: not the same run" in log
    before, raw, average = stored(tmp_path / "run", 2), stored(tmp_path / "run", 3, "raw"), stored(tmp_path / "run", 3)
    name = "fc.weight"
    torch.testing.assert_close(average[name], 0.75 * before[name] + 0.25 * raw[name])
    log = train_here(tmp_path / "run", f"{flags} 4")
    assert "has an average of the weights, which this run, without --ema, leaves out" in log
    train_here(tmp_path / "never", f"{flags} 4")
    assert losses(tmp_path / "run") == losses(tmp_path / "never")
    assert same(stored(tmp_path / "run", 4), stored(tmp_path / "never", 4))


# ---- --lora


@pytest.mark.long
@needs_peft
def test_adapters_are_trained_resumed_and_merged(glyphs, pretrained, tmp_path):
    """With an average and a teacher."""
    flags = f"--dataset glyphs --rec {glyphs} {FLAGS} --pretrained {pretrained} --lora 4 --ema 0.9"
    flags += f" --teacher {pretrained} --max-steps"
    log = train_here(tmp_path / "whole", f"{flags} 8")
    assert "--lora 4: adapters on 11 layers" in log
    train_here(tmp_path / "parts", f"{flags} 5")
    train_here(tmp_path / "parts", f"{flags} 8")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    same_tensors(step(tmp_path / "whole", 8), step(tmp_path / "parts", 8))
    # The base is as it was, and what is delivered is base + B A, of raw weights and of their average.
    base, raw = load_file(pretrained / "model.safetensors"), stored(tmp_path / "whole", 8, "raw")
    average = raw | stored(tmp_path / "whole", 8, "ema")
    conv = "layer2.0.conv1"
    assert torch.equal(raw[f"{conv}.base_layer.weight"], base[f"{conv}.weight"])
    for state, file in ((average, "model"), (raw, "model-raw")):
        delivered = load_file(tmp_path / f"whole/{file}.safetensors")
        assert delivered.keys() == base.keys()
        b, a = (state[f"{conv}.lora_{side}.default.weight"].double() for side in "BA")
        expected = base[f"{conv}.weight"] + torch.einsum("orxy,rikl->oikl", b, a).float()
        torch.testing.assert_close(delivered[f"{conv}.weight"], expected, rtol=1e-6, atol=1e-6)
        assert not torch.equal(delivered[f"{conv}.weight"], base[f"{conv}.weight"])
    assert partial_fc.load(step(tmp_path / "whole", 8)).step == 8
    with pytest.raises(ValueError, match=r"--lora 4, this run has 0: other parameters are trained"):
        train_here(tmp_path / "whole", f"--dataset glyphs --rec {glyphs} {FLAGS} --max-steps 9")


# ---- --teacher


def cosine_to(teacher, student, glyphs) -> float:
    source = partial_fc.data.open_source(glyphs)
    from partial_fc.data.decode import decode

    image = [decode(source.read(i).image) for i in range(0, len(source), 40)]
    return float(np.mean(np.sum(teacher.embed(image) * student.embed(image), axis=1)))


@pytest.mark.long
def test_a_teacher_pulls_embeddings_towards_its_own(glyphs, pretrained, tmp_path):
    flags = f"--dataset glyphs --rec {glyphs} {FLAGS} --max-steps 40 --frequent 20 --seed 7"
    train_here(tmp_path / "alone", flags)
    log = train_here(tmp_path / "taught", f"{flags} --teacher {pretrained} --teacher-weight 20")
    shown = [float(line.split("teacher loss ")[1].split()[0]) for line in log.splitlines() if "teacher loss" in line]
    assert len(shown) >= 3
    assert 0 < shown[-1] < 0.6 * shown[0]
    assert losses(tmp_path / "taught")[0] > shown[0]  # which is a part of it
    teacher = partial_fc.load(pretrained)
    close = {name: cosine_to(teacher, partial_fc.load(tmp_path / name), glyphs) for name in ("alone", "taught")}
    assert close["taught"] > close["alone"] + 0.2


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--embedding-size 16", "its embedding has 32 numbers, this run's 16; give --embedding-size 32"),
        ("--image-size 32", "--teacher: .* was trained on images of 40 pixels; image_size is 32"),
    ],
)
def test_a_teacher_of_other_sizes_is_named(glyphs, pretrained, tmp_path, flags, says):
    with pytest.raises(ValueError, match=says):
        train_here(tmp_path, f"--dataset glyphs --rec {glyphs} {FLAGS} --max-steps 2 --teacher {pretrained} {flags}")
    with pytest.raises(ValueError, match=r"--teacher: missing.pt not found"):
        train_here(tmp_path, f"--dataset glyphs --rec {glyphs} {FLAGS} --max-steps 2 --teacher missing.pt")
