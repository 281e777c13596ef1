"""Trainings with sampled classes beside arcface_torch's: a dense table of centres, of which PartialFC_V2 indexes the
classes that take part, under torch's own optimizers, which move every row in every step.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partial_fc.head import CosFace, PartialFC, RowAdamW, RowSGD
from tests.flat import flat_head, learn
from tests.unit.thread_world import ThreadWorld, in_world

C, D, INPUTS, PER_RANK, STEPS = 61, 8, 12, 6, 200  # 61 classes: no number of ranks divides them
MARGIN = CosFace(16.0, 0.2)
OURS: dict[str, Any] = {
    "sgd": (RowSGD(0.9, 5e-3), lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=5e-3), 0.2),
    "adamw": (RowAdamW(weight_decay=0.1), lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.1), 0.01),
}


def lr_of(step: int, lr: float) -> float:
    return lr * (1 - step / STEPS)


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns inputs (size * PER_RANK, INPUTS) and labels of all ranks."""
    generator = torch.Generator().manual_seed(step)
    label_G = torch.randint(0, C, (size * PER_RANK,), generator=generator)
    means = torch.randn(C, INPUTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return means[label_G] + 0.3 * torch.randn(len(label_G), INPUTS, generator=generator, dtype=torch.float64), label_G


def weights() -> Tensor:
    return torch.randn(INPUTS, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ours(world: ThreadWorld, kind: str, rate: Any, margin: Any = MARGIN, **options: Any) -> dict[str, Any]:
    """Trains a linear backbone and the head on this rank; returns losses, the classes that took part in each step, and
    centres and backbone before and after."""
    optimizer, make, lr = OURS[kind]
    backbone = nn.Parameter(weights())
    of_backbone = make([backbone])
    options = {"quota": "insightface", "dtype": torch.float64, "seed": 3, "optimizer": optimizer, **options}
    head = flat_head(C, D, margin, rate, world, **options)
    found: dict[str, Any] = {"losses": [], "drawn": [], "start": head.centres.clone(), "lr": lr}
    for step in range(STEPS):
        input_GI, label_G = batch(step, world.size)
        part = slice(world.rank * PER_RANK, (world.rank + 1) * PER_RANK)
        rows = head.active_rows(label_G).rows
        local = torch.arange(len(head.shard)) if rows is None else rows
        found["drawn"].append(local + head.shard.start)
        loss = head(input_GI[part] @ backbone, label_G[part])
        of_backbone.zero_grad()
        loss.backward()
        assert backbone.grad is not None
        backbone.grad.copy_(world.all_reduce(backbone.grad, name="test/backbone"))
        of_backbone.param_groups[0]["lr"] = lr_of(step, lr)
        of_backbone.step()
        head.step(lr_of(step, lr))
        found["losses"].append(loss.item())
    return {**found, "centres": head.centres.clone(), "backbone": backbone.detach()}


def theirs(kind: str, size: int, drawn: list[Tensor], start_CD: Tensor) -> dict[str, Any]:
    """The same in one process: softmax over the indexed rows of a dense parameter."""
    _, make, lr = OURS[kind]
    backbone, centre_CD = nn.Parameter(weights()), nn.Parameter(start_CD.clone())
    optimizer = make([backbone, centre_CD])
    losses = []
    for step, class_S in enumerate(drawn):
        input_GI, label_G = batch(step, size)
        cosine_GS = F.normalize(input_GI @ backbone) @ F.normalize(centre_CD[class_S]).T
        target_G = torch.searchsorted(class_S, label_G)
        loss = F.cross_entropy(16.0 * (cosine_GS - 0.2 * F.one_hot(target_G, len(class_S)).double()), target_G)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step, lr)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "centres": centre_CD.detach(), "backbone": backbone.detach()}


def largest_difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def whole(found: list[dict[str, Any]], name: str) -> Tensor:
    return torch.cat([rank[name] for rank in found])


@pytest.mark.parametrize(("kind", "size", "rate"), [("sgd", 1, 0.3), ("sgd", 3, 0.1), ("adamw", 2, 0.1)])
@pytest.mark.slow
def test_a_sampled_training_is_that_of_a_dense_optimizer(kind, size, rate):
    found = in_world(size, lambda world: ours(world, kind, rate))
    drawn = [torch.cat(parts) for parts in zip(*(rank["drawn"] for rank in found), strict=True)]
    assert min(map(len, drawn)) < 0.5 * C
    expected = theirs(kind, size, drawn, whole(found, "start"))
    losses = torch.tensor([found[0]["losses"], expected["losses"]], dtype=torch.float64)
    assert (losses[0] - losses[1]).abs().max() < 1e-9
    assert losses[1][-20:].mean() < losses[1][:20].mean() / 1.5, "it learns"
    assert largest_difference(whole(found, "centres"), expected["centres"]) < 1e-9
    assert largest_difference(found[0]["backbone"], expected["backbone"]) < 1e-9


def test_resting_centres_train_otherwise():
    (found,) = in_world(1, lambda world: ours(world, "sgd", 0.1, catch_up="none"))
    expected = theirs("sgd", 1, found["drawn"], found["start"])
    assert largest_difference(found["centres"], expected["centres"]) > 0.1


@pytest.mark.parametrize("optimizer", [RowSGD(0.9, 5e-3), RowAdamW()])
def test_without_sampling_no_learning_rates_are_kept(optimizer):
    """Also of a head that goes on without sampling."""
    head, whole = (PartialFC(C, D, MARGIN, rate, optimizer=optimizer) for rate in (0.2, 1.0))
    for step in range(6):
        if step == 4:
            whole.load_state_dict(head.state_dict())
            head = whole
        label_G = batch(step, 1)[1]
        learn(head, torch.randn(len(label_G), D).requires_grad_(), label_G)
        schedule = head.facts()["schedule"]
        assert (schedule["first"], len(schedule["rates"])) == ((0, step + 1) if step < 4 else (step + 1, 0))


def test_a_checkpoint_made_with_none_goes_on_with_none(caplog):
    """And one made without sampling, whose centres are all as of its last step, with exact."""
    caplog.set_level("INFO", logger="partial_fc")
    for rate, catch_up, expected in ((0.3, "none", {}), (1.0, "exact", {"first": 1, "rates": []})):
        head = flat_head(C, D, MARGIN, rate, catch_up=catch_up)
        learn(head, torch.randn(4, D).requires_grad_(), torch.arange(4))
        caplog.clear()
        again = PartialFC(C, D, MARGIN, 0.3)
        again.load_state_dict(head.state_dict())
        assert expected.items() <= again.facts()["schedule"].items()
        assert bool(again.facts()["schedule"]) == bool(expected)
        assert ("rested" in caplog.text) == (catch_up == "none")
        learn(again, torch.randn(4, D).requires_grad_(), torch.arange(4))
