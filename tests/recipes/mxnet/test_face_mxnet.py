"""Recipe `face` with --engine mxnet: two processes of Horovod, engines taking turns."""

import sys

import cv2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.running import LAUNCHERS, face, losses, result, run

pytestmark = pytest.mark.mxnet
SIZE = 24
# Weak slopes and a low rate: where they are not, rounding errors at the kinks of ReLU grow, in torch alone as well.
CURVE = (
    f"--image-size {SIZE} --no-mirror --optimizer sgd --momentum 0 --scale 2 --loss cosface --margins None --lr 0.001 "
    "--lr-scheduler constant --warmup-steps 0 --batch-size 16 --val-targets"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """32 classes of ten images of noise: two epochs of them are never learned by heart."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for label in range(32):
        (folder / str(label)).mkdir()
        for number in range(10):
            noise = random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / str(label) / f"{number}.png"), noise)
    return folder


@pytest.fixture(scope="module")
def runs(mx, images, tmp_path_factory):
    """Folders of what two processes trained, in one launch, and what they printed."""
    root = tmp_path_factory.mktemp("two")
    flags = f"--rec {images} {CURVE}"
    turns = [
        (root / "torch", f"{flags} --max-steps 6"),
        (root / "mxnet", f"{flags} --max-steps 6 --engine mxnet"),
        (root / "turns", f"{flags} --max-steps 2"),
        (root / "turns", f"{flags} --max-steps 4 --engine mxnet"),
        (root / "turns", f"{flags} --max-steps 6"),
    ]
    given = [str(face(folder, words)) for folder, words in turns]
    printed = run([*LAUNCHERS["horovodrun --gloo"], sys.executable, "-m", "tests.running", *given])
    assert printed.count(" ended with: 0\n") == 2 * len(turns), printed[-6000:]
    return root, printed


def distance(one, other) -> float:
    return max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True))


def test_two_processes_of_horovod_have_the_losses_of_torch(runs):
    root, _ = runs
    assert len(losses(root / "torch")) == 6
    assert distance(root / "torch", root / "mxnet") < 1e-5
    assert result(root / "mxnet")["backend"] == "horovod"
    assert result(root / "mxnet")["world_size"] == 2


def test_the_engines_go_on_from_one_anothers_checkpoints(runs):
    root, printed = runs
    assert distance(root / "torch", root / "turns") < 1e-5
    assert "step-00000004" in printed
    assert "step-00000002" in printed
    models = [load_file(root / name / "model.safetensors") for name in ("torch", "mxnet", "turns")]
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], atol=1e-5, rtol=1e-4)
