"""Adapters: where they are put, what they train, and the plain network that they are merged into."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from partial_fc import models
from partial_fc.models import lora

SIZE, RANK, WIDTH = 32, 3, 16
pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


class Torchs(nn.Module):
    """A network with torch's own attention, whose output layer is never called."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.last = nn.Linear(16, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.last(self.block(self.patches(x).flatten(2).mT).mean(1)))


def made(name: str) -> nn.Module:
    if name.startswith("timm:") and importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    torch.manual_seed(5)
    module = Torchs() if name == "torch's" else models.build(name, WIDTH, SIZE)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.ones_(layer.weight)  # timm's zeros would keep gradients out of its branches
    return module


@pytest.mark.parametrize(
    ("name", "last", "num_adapters"),
    [
        ("tiny", "fc", 11), pytest.param("mbf", "features.layers.2", 32, marks=pytest.mark.long),
        pytest.param("vit_t", "feature.2", 50, marks=pytest.mark.long),
        pytest.param("timm:vit_tiny_patch16_224", "head", 49, marks=pytest.mark.long),
        pytest.param("timm:resnet10t", "fc", 14, marks=pytest.mark.long), ("torch's", "last", 3),
    ],
)  # fmt: skip
def test_adapters_train_and_are_merged_into_the_plain_network(name, last, num_adapters):
    module = made(name)
    plain = copy.deepcopy(module)
    image = torch.randn(4, 3, SIZE, SIZE)
    module.eval()
    before = module(image)
    said = lora.adapt(module, RANK, SIZE)
    assert f"{last} in full" in said
    adapters = {n.partition(".lora_")[0] for n, _ in module.named_parameters() if ".lora_" in n}
    assert len(adapters) == num_adapters
    assert f"adapters on {num_adapters} layers" in said
    trained = [n for n, p in module.named_parameters() if p.requires_grad]
    assert {f"{last}.weight"} < set(trained)
    in_full = {n for n in trained if ".lora_" not in n}
    assert {n.partition(".")[0] for n in in_full} <= {last.partition(".")[0], "features", "norm"}
    assert not any(".base_layer." in n for n in in_full)
    assert torch.equal(module.eval()(image), before)

    optimizer, curve = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.01), []
    wanted = torch.randn(4, WIDTH)
    for _ in range(6):
        optimizer.zero_grad()
        loss = (module.train()(image) - wanted).square().mean()
        loss.backward()
        assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
        optimizer.step()
        curve.append(loss.item())
    assert curve[-1] < curve[0]
    state = module.state_dict()
    deltas = [n for n in adapters if state[f"{n}.lora_B.default.weight"].abs().max() > 0]
    assert len(deltas) == len(adapters)
    merged = lora.merged(state)
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged)
    with torch.no_grad():
        expected, found = module.eval()(image), plain.eval()(image)
    assert not torch.allclose(expected, before, atol=1e-3)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    for n in adapters:  # peft's own sum
        layer = module.get_submodule(n)
        delta = layer.get_delta_weight("default")
        torch.testing.assert_close(merged[f"{n}.weight"], layer.base_layer.weight + delta, rtol=1e-5, atol=1e-5)
    # Resuming takes the adapted network's own tensors out of both.
    assert lora.without_merged({**merged, **state}).keys() == state.keys()


def test_a_state_without_adapters_stays_as_it_is():
    state = made("tiny").state_dict()
    assert lora.merged(state) == state
    assert lora.without_merged(state) == state


def test_a_network_without_layers_to_adapt_is_named():
    with pytest.raises(ValueError, match=r"--lora 3: Sequential .* nothing to adapt"):
        lora.adapt(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, WIDTH)), RANK, SIZE)
