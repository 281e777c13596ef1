"""The backbone's optimizer is torch's, bit by bit, and starts without what only torch.compile needs."""

import copy
import sys

import pytest
import torch
from torch import nn

from partial_fc.optim import backbone


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
    gradients = [[torch.randn_like(p) for p in module.parameters()] for _ in range(4)]

    def step(optimizer, module, number):
        backbone.set_lr(optimizer, 0.1 / (1 + number))
        for p, gradient in zip(module.parameters(), gradients[number], strict=True):
            p.grad = gradient.clone()
        optimizer.step()

    for number in range(4):
        step(expected, other, number)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch._dynamo", None)  # importing it raises
        optimizer = backbone.build(kind, module, 0.9, 0.01)
        for number in range(2):
            step(optimizer, module, number)
        kept = {name: t.clone() for name, t in backbone.named_state(optimizer, module).items()}  # as in a checkpoint
        optimizer = backbone.build(kind, module, 0.9, 0.01)
        backbone.load_named_state(optimizer, module, kept)
        for number in range(2, 4):
            step(optimizer, module, number)
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="belongs to no parameter"):
        backbone.load_named_state(optimizer, module, {"9.weight/momentum_buffer": torch.ones(1)})
    assert isinstance(optimizer, type(expected))
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.requires_grad
        assert p.grad is None
