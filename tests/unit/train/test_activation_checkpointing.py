import pytest
import torch
from torch import Tensor, nn

from partial_fc import models
from partial_fc.train import activation_checkpointing
from recipes.mnist.convnet import ConvNet
from tests.unit.models.test_models import narrow_r18

pytestmark = pytest.mark.slow

# 17 pixels are halved to 9, 5, 3 and 2. (CPUs without fp16 arithmetic take seconds over larger images.)
B, D, SIDE = 3, 8, 17


def backbone(name: str, block_dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = models.build(name, D, SIDE, dropout=0.1) if name != "narrow r18" else narrow_r18(D, SIDE, 0.1)
    if block_dropout:
        for block in model.modules():
            if isinstance(block, models.BLOCKS):
                norm = "bn3" if hasattr(block, "bn3") else "layers.2"
                old = block.get_submodule(norm)
                block.set_submodule(norm, nn.Sequential(old, nn.Dropout(block_dropout)))
    return model


def steps(model: nn.Module, autocast: torch.dtype | None = None, num_steps: int = 2) -> list[Tensor]:
    """Losses, gradients of the last step, and everything in the state dict, of a few steps of SGD."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        image = torch.randn(B, 3, SIDE, SIDE).to(dtype)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            feat_BD = model(image)
        loss = (feat_BD * torch.randn(B, D)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *model.state_dict().values(), torch.get_rng_state()]


def assert_same_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["narrow r18", "mbf", "tiny"])
def test_training_is_the_same_to_the_bit(name, layout):
    plain, recomputed = backbone(name, 0.3), backbone(name, 0.3)
    for model in (plain, recomputed):
        model.to(memory_format=layout)  # type: ignore[call-overload]
    names = list(recomputed.state_dict())
    activation_checkpointing.enable(recomputed)
    assert list(recomputed.state_dict()) == names
    assert_same_bits(steps(recomputed), steps(plain))


@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp64"])
def test_in_every_precision(mode):
    plain, recomputed = backbone("tiny"), activation_checkpointing.enable(backbone("tiny"))
    if mode == "fp64":
        plain, recomputed = plain.double(), recomputed.double()
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    assert_same_bits(steps(recomputed, autocast), steps(plain, autocast))


def test_an_overflow_leaves_the_same_running_statistics():
    plain, recomputed = backbone("tiny"), activation_checkpointing.enable(backbone("tiny"))
    for model in (plain, recomputed):
        model(torch.full((B, 3, SIDE, SIDE), 3e38)).sum().backward()
    assert not all(buffer.isfinite().all() for buffer in plain.buffers())
    for one, other in zip(recomputed.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def kept_bytes(model: nn.Module, image: Tensor) -> int:
    """What the graph of a forward pass holds besides the parameters: each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        feat = model(image)
    assert feat.requires_grad
    return sum(t.untyped_storage().nbytes() for key, t in held.items() if key not in own)


@pytest.mark.parametrize(("name", "share"), [("r18", 0.45), pytest.param("r50", 0.3, marks=pytest.mark.long)])
def test_memory_falls(name, share):
    torch.manual_seed(0)
    model, image = models.build(name, D, 32), torch.randn(2, 3, 32, 32)
    before = kept_bytes(model, image)
    after = kept_bytes(activation_checkpointing.enable(model), image)
    assert after < share * before


def test_a_network_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"--activation-checkpointing: ConvNet has no blocks .* leave the flag off"):
        activation_checkpointing.enable(ConvNet())
