"""Fine-tuning: imprinted centres, a frozen backbone, a rate of its own, and a warm start of both halves."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.running import losses, same_tensors, train_here, train_several

FLAGS = (
    "--dataset glyphs --val-targets --batch-size 8 --image-size 24 --check-data off --lr-scheduler constant "
    "--warmup-steps 0"
)
STEPS = 10


@pytest.fixture(scope="module")
def encoder(glyphs, tmp_path_factory) -> tuple[Path, str]:
    """(a run of some steps, flags of runs that start from its backbone)."""
    root = tmp_path_factory.mktemp("encoder")
    train_here(root, f"{FLAGS} --rec {glyphs} --batch-size 16 --max-steps {STEPS}")
    return root, f"{FLAGS} --rec {glyphs} --pretrained {root}"


def tensors(root: Path, step: int, pattern: str = "*") -> dict[str, torch.Tensor]:
    """Those of a checkpoint, by file and name."""
    folder = root / f"checkpoints/step-{step:08d}"
    return {f"{path.name}/{k}": t for path in folder.glob(f"{pattern}.safetensors") for k, t in load_file(path).items()}


def statistics(weights: dict[str, torch.Tensor]) -> set[str]:
    """The names of running statistics."""
    return {name for name in weights if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}


def test_both_halves_of_a_run_start_another_one(encoder, tmp_path):
    root, flags = encoder
    printed = train_here(tmp_path, f"{flags} --start-centres {root} --lr 0 --max-steps 1")
    assert f"class centres from {root}/checkpoints/step-{STEPS:08d}" in printed
    assert "step 1/1" in printed
    then, now = (tensors(path, step, "head-*-classes-*") for path, step in ((root, STEPS), (tmp_path, 1)))
    assert torch.equal(*(next(t for name, t in found.items() if name.endswith("/centres")) for found in (then, now)))
    then, now = (load_file(path / "model.safetensors") for path in (root, tmp_path))
    assert not {name for name, t in then.items() if not torch.equal(t, now[name])} - statistics(then)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("--optimizer adamw", marks=pytest.mark.long),
        pytest.param("--precision fp16 --clip 5", marks=pytest.mark.long),
        "--sync-bn --on-nan skip",
    ],
)
def test_a_frozen_backbone_stays_as_it_is_also_when_resumed(encoder, tmp_path, more):
    root, flags = encoder
    flags = f"{flags} --freeze-steps 4 {more} --checkpoint-every 2 --verbose 3 --max-steps"
    train_here(tmp_path / "whole", f"{flags} 6")
    before = load_file(root / "model.safetensors")
    frozen = load_file(tmp_path / "whole/checkpoints/step-00000004/backbone.safetensors")
    assert before.keys() == frozen.keys()
    assert all(torch.equal(t, frozen[name]) for name, t in before.items())
    assert not tensors(tmp_path / "whole", 4, "optimizer")
    assert tensors(tmp_path / "whole", 2, "head*").keys() == tensors(tmp_path / "whole", 4, "head*").keys()
    one, other = (tensors(tmp_path / "whole", step, "head-*-classes-*") for step in (2, 4))
    assert any(not torch.equal(t, other[name]) for name, t in one.items())
    after = load_file(tmp_path / "whole/checkpoints/step-00000006/backbone.safetensors")
    assert sum(torch.equal(t, after[name]) for name, t in before.items()) < 3
    for steps in (2, 5, 6):
        train_here(tmp_path / "parts", f"{flags} {steps}")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    same_tensors(*(tmp_path / name / "checkpoints/step-00000006" for name in ("whole", "parts")))


@pytest.mark.long
def test_a_frozen_backbone_of_two_processes(encoder, tmp_path):
    flags = f"{encoder[1]} --freeze-steps 2 --sync-bn --precision fp64 --max-steps 3"
    train_here(tmp_path / "one", f"{flags} --batch-size 16")
    train_several({tmp_path / "two": flags})
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-7
