"""torch.compile over a backbone and its head: the same losses, and no warnings."""

import warnings

import pytest
import torch
from torch import nn

from partial_fc import linear_partial_cross_entropy
from partial_fc.head import CosFace
from tests.unit.head import test_module
from tests.unit.head.test_module import C, D, batch


class Model(test_module.Model):
    def forward(self, x, label):
        return super().forward(x, label) * 1.0

    def learn(self, lr: float) -> None:
        self.head.step(lr)


class WithNearest(Model):
    def forward(self, x, label):
        loss, _, class_BK = self.head.loss_and_topk(self.net(x), label, k=3)
        return loss + 0.0 * (class_BK == label[:, None]).any(dim=1).float().mean()


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(5, D)
        self.centres = nn.Parameter(torch.randn(C, D))

    def forward(self, x, label):
        return linear_partial_cross_entropy(self.net(x), self.centres, label, CosFace(scale=8.0)) * 1.0

    def learn(self, lr: float) -> None:
        """The optimizer has the centres."""


def losses(model, call) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        loss = call(*batch(step))
        loss.backward()
        optimizer.step()
        model.learn(0.1)
        found.append(loss.item())
    return found


def compiled_losses(make, backend: str) -> list[float]:
    """Fails for a warning that a user would see. (Filters that raise would also see those that torch.compile hides.)"""
    torch._dynamo.reset()
    model = make()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # as Python does; PyTorch's compiler has some
        found = losses(model, torch.compile(model, backend=backend))
    assert [str(warning.message) for warning in seen] == []
    return found


MODELS = [Model, lambda: Model(sample_rate=0.3, impl="plain"), WithNearest, Functional]


@pytest.mark.parametrize(
    "make",
    [MODELS[0], *(pytest.param(make, marks=pytest.mark.long) for make in MODELS[1:])],
    ids=["loss", "sampled", "loss_and_topk", "functional"],
)
def test_a_compiled_model_has_the_losses_of_the_plain_one(make):
    model = make()
    assert compiled_losses(make, "aot_eager") == losses(model, model)


@pytest.mark.long
@pytest.mark.slow
def test_the_default_compiler_takes_the_backbone():
    """(By a C++ compiler, which the head's kernel needs as well.)"""
    model = Model()
    torch.testing.assert_close(compiled_losses(Model, "inductor"), losses(model, model))
