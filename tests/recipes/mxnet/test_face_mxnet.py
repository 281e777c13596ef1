"""Recipe `face` with --engine mxnet: two processes of Horovod, engines taking turns, networks of MXNet's own."""

import sys

import cv2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from partial_fc.foreign import ndarray_file
from tests.recipes.mxnet.mxnet_network import arrays_of, small_network
from tests.running import LAUNCHERS, face, losses, result, run, train_here

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
def network(mx, tmp_path_factory) -> str:
    """The flags of a network of MXNet's own."""
    folder = tmp_path_factory.mktemp("network")
    symbol = small_network(mx)
    symbol.save(str(folder / "net-symbol.json"))
    ndarray_file.write(folder / "net-0000.params", arrays_of(mx, symbol, SIZE))
    return f"--engine mxnet --symbol {folder}/net-symbol.json --params {folder}/net-0000.params --output-name fc1"


@pytest.fixture(scope="module")
def runs(images, network, tmp_path_factory):
    """Folders of what two processes trained, in one launch, and what they printed."""
    root = tmp_path_factory.mktemp("two")
    flags = f"--rec {images} {CURVE}"
    turns = [
        (root / "torch", f"{flags} --max-steps 10"),
        (root / "mxnet", f"{flags} --max-steps 10 --engine mxnet"),
        (root / "turns", f"{flags} --max-steps 4"),
        (root / "turns", f"{flags} --max-steps 7 --engine mxnet"),
        (root / "turns", f"{flags} --max-steps 10"),
        (root / "symbol", f"{flags} --max-steps 6 {network}"),
    ]
    given = [str(face(folder, words)) for folder, words in turns]
    printed = run([*LAUNCHERS["horovodrun --gloo"], sys.executable, "-m", "tests.running", *given])
    assert printed.count(" ended with: 0\n") == 2 * len(turns), printed[-6000:]
    return root, printed


def distance(one, other) -> float:
    return max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True))


def test_two_processes_of_horovod_have_the_losses_of_torch(runs):
    root, _ = runs
    assert len(losses(root / "torch")) == 10
    assert distance(root / "torch", root / "mxnet") < 1e-5
    assert result(root / "mxnet")["backend"] == "horovod"
    assert result(root / "mxnet")["world_size"] == 2


def test_the_engines_go_on_from_one_anothers_checkpoints(runs):
    root, printed = runs
    assert distance(root / "torch", root / "turns") < 1e-5
    assert "step-00000004" in printed
    assert "step-00000007" in printed
    models = [load_file(root / name / "model.safetensors") for name in ("torch", "mxnet", "turns")]
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], atol=1e-5, rtol=1e-4)


def test_what_is_delivered_has_the_statistics_of_both_processes(runs):
    """... of a network of MXNet's own, under its names."""
    root, _ = runs
    delivered = ndarray_file.read(root / "symbol/model-0000.params")
    folder = root / "symbol/checkpoints/step-00000006"
    own = [load_file(folder / f"rank-0000{rank}-of-00002.safetensors") for rank in range(2)]
    for name in ("bn0_moving_mean", "fc1_moving_mean"):
        ranks = [part[f"buffer/{name}"] for part in own]
        assert not torch.equal(*ranks)
        torch.testing.assert_close(delivered[f"aux:{name}"], sum(ranks) / 2)


@pytest.mark.long
def test_mxnet_loads_what_is_delivered_and_resuming_draws_the_same_dropout(mx, images, network, tmp_path):
    flags = f"--rec {images} {CURVE} {network} --scale 8 --lr 0.05"
    train_here(tmp_path / "whole", f"{flags} --max-steps 8")
    for steps in (4, 8):
        train_here(tmp_path / "parts", f"{flags} --max-steps {steps}")
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")

    from recipes.mxnet.symbol import SymbolNetwork

    symbol, arguments, states = mx.model.load_checkpoint(str(tmp_path / "whole/model"), 0)
    image_B = torch.rand(5, 3, SIZE, SIZE) * 255
    module = mx.mod.Module(symbol, label_names=None)
    module.bind([("data", tuple(image_B.shape))], for_training=False)
    module.set_params(arguments, states)
    module.forward(mx.io.DataBatch([mx.nd.array(image_B.numpy())]), is_train=False)
    theirs = torch.from_numpy(module.get_outputs()[0].asnumpy())

    ours = SymbolNetwork(symbol, load_file(tmp_path / "whole/model.safetensors")).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(image_B), theirs)
