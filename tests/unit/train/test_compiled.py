"""--compile: what training computes, and that everything else sees the module itself. The backend is torch's aot_eager,
which traces and differentiates as inductor does, without its C++ compiler."""

from functools import partial

import pytest
import torch

from partial_fc import models
from partial_fc.comm import SingleWorld
from partial_fc.models import vit
from partial_fc.models.inputs import FACE
from partial_fc.optim import backbone as torch_optim
from partial_fc.train import activation_checkpointing
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.batch_norm import convert
from partial_fc.train.precision import Precision

B, SIZE, D = 4, 24, 8


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def backbone(name: str, mode: str = "fp32", checkpointing: bool = False, sync_bn: bool = False) -> TorchBackbone:
    torch.manual_seed(0)
    size = vit.Size(32, 2, drop_path=0.3)
    module = vit.VisionTransformer(size, D, SIZE) if name == "vit" else models.build(name, D, SIZE, dropout=0.2)
    if sync_bn:
        module = convert(module, SingleWorld())
    if checkpointing:
        activation_checkpointing.enable(module)
    optimizer = partial(torch_optim.build, "adamw", momentum=0.9, weight_decay=0.05)
    precision = Precision(mode, torch.device("cpu"))
    return TorchBackbone(module, SingleWorld(), precision, optimizer, FACE, {}, seed=1)


def step(trained: TorchBackbone) -> list[torch.Tensor]:
    """All gradients in one vector, the output and the running statistics of one update."""
    torch.manual_seed(1)
    pixel_B = torch.randint(0, 256, (B, 3, SIZE, SIZE), dtype=torch.uint8)
    trained.train()
    trained.zero(B)
    trained.name_samples(torch.arange(10, 10 + B))
    output_B = trained.forward(pixel_B)
    trained.backward(torch.randn(B, D) * 1e-3)
    trained.wait()
    gradients = torch.cat([g.float().flatten() for g in trained.gradients().values()])
    return [gradients, output_B.detach(), *trained.module.buffers()]


@pytest.mark.long  # tracing each takes seconds
@pytest.mark.parametrize(
    ("name", "mode", "checkpointing"), [("tiny", "fp32", True), ("vit", "bf16", True), ("tiny", "fp16-o2", False)]
)
def test_a_compiled_step_is_that_of_the_module(name, mode, checkpointing):
    plain, compiled = (backbone(name, mode, checkpointing) for _ in range(2))
    before = [t.clone() for t in compiled.module.state_dict().values()]
    generator = torch.get_rng_state()
    assert compiled.compile(torch.zeros(B, 3, SIZE, SIZE, dtype=torch.uint8)) == ""
    assert all(torch.equal(a, b) for a, b in zip(before, compiled.module.state_dict().values(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    assert compiled._trained is not compiled.module
    assert compiled.state()[0].keys() == plain.state()[0].keys()
    rounding = {"fp32": 1e-5, "bf16": 0.02, "fp16-o2": 0.01}[mode]
    for a, b in zip(step(plain), step(compiled), strict=True):
        assert (a.double() - b.double()).norm() <= rounding * a.double().norm()


@pytest.mark.long
def test_what_cannot_be_compiled_goes_on_without_and_says_why(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler")

    shared = backbone("tiny", sync_bn=True)
    assert "--sync-bn" in shared.compile(torch.zeros(B, 3, SIZE, SIZE, dtype=torch.uint8))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    plain, other = backbone("tiny"), backbone("tiny")
    assert "no C++ compiler" in other.compile(torch.zeros(B, 3, SIZE, SIZE, dtype=torch.uint8))
    assert other._trained is other.module
    assert all(torch.equal(a, b) for a, b in zip(step(plain), step(other), strict=True))
