"""The optimizers against torch's own, without what only torch.compile needs, and the matrices that Muon makes."""

import copy
import sys

import pytest
import torch
from torch import nn

from partial_fc.optim import backbone
from partial_fc.optim.muon import orthogonal


def stepped(optimizer: torch.optim.Optimizer, module: nn.Module, gradients: list[dict], lr: float) -> None:
    for gradient in gradients:
        backbone.set_lr(optimizer, lr)
        for name, p in module.named_parameters():
            p.grad = gradient[name].clone()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=0.01)),
        ("adamw", lambda parameters: torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.01, fused=True)),
    ],
)
def test_it_is_torchs_without_torch_dynamo(kind, theirs, monkeypatch):
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    other = copy.deepcopy(module)
    expected = theirs(other.parameters())
    gradients = [{name: torch.randn_like(p) for name, p in module.named_parameters()} for _ in range(4)]
    for number, gradient in enumerate(gradients):
        stepped(expected, other, [gradient], 0.1 / (1 + number))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch._dynamo", None)  # importing it raises
        optimizer = backbone.build(kind, module, 0.9, 0.01)
        for number in range(4):
            if number == 2:  # from a checkpoint
                kept = {name: t.clone() for name, t in backbone.named_state(optimizer, module).items()}
                optimizer = backbone.build(kind, module, 0.9, 0.01)
                backbone.load_named_state(optimizer, module, kept)
            stepped(optimizer, module, [gradients[number]], 0.1 / (1 + number))
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="belongs to no parameter"):
        backbone.load_named_state(optimizer, module, {"9.weight/momentum_buffer": torch.ones(1)})
    assert isinstance(optimizer, type(expected))
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.requires_grad
        assert p.grad is None


def test_matrices_move_as_by_torchs_muon_and_the_rest_by_its_adamw(monkeypatch):
    """torch's multiplies in bfloat16: its steps differ by that much. The rest is equal to the bit."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(24, 6))
    other = copy.deepcopy(module)
    start = module[2].weight.detach().clone()
    gradients = [{name: torch.randn_like(p) for name, p in module.named_parameters()} for _ in range(4)]
    torchs = torch.optim.Muon([other[2].weight], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW([p for name, p in other.named_parameters() if name != "2.weight"], weight_decay=0.1)
    stepped(torchs, other, gradients, 0.01)
    stepped(rest, other, gradients, 0.01)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it raises
    stepped(backbone.build("muon", module, 0.9, 0.1), module, gradients, 0.01)
    for (name, ours), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        if name != "2.weight":
            assert torch.equal(ours, theirs), name
    moved, wanted = module[2].weight - start, other[2].weight - start
    assert (moved - wanted).norm() < 0.03 * wanted.norm()


def test_a_matrix_becomes_nearly_orthogonal_whatever_its_shape():
    """With the singular vectors that it has."""
    torch.manual_seed(0)
    for shape in ((6, 40), (40, 6), (9, 9)):
        u, s, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
        made = u.T @ orthogonal(u @ torch.diag(s.clamp(min=0.1)) @ vh) @ vh.T
        assert (made - torch.diag(made.diagonal())).abs().max() < 1e-3
        assert made.diagonal().min() > 0.6
        assert made.diagonal().max() < 1.3


def test_a_convolution_is_a_matrix_whatever_its_layout_and_its_state_is_stored():
    torch.manual_seed(0)
    one = nn.Conv2d(8, 4, 3, bias=False)
    other = copy.deepcopy(one).to(memory_format=torch.channels_last)
    gradients = [{"weight": torch.randn(4, 8, 3, 3)} for _ in range(3)]
    optimizer = backbone.build("muon", one, 0.9, 0.01)
    stepped(optimizer, one, gradients[:2], 0.01)
    resumed, kept = backbone.build("muon", one, 0.9, 0.01), backbone.named_state(optimizer, one)
    assert list(kept) == ["weight/momentum"]
    backbone.load_named_state(resumed, one, kept)
    stepped(resumed, one, gradients[2:], 0.01)
    stepped(backbone.build("muon", other, 0.9, 0.01), other, gradients, 0.01)
    torch.testing.assert_close(one.weight, other.weight)
