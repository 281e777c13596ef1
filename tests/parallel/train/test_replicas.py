"""The check that the replicas are one: a single bit on one rank is found and named, on all ranks alike."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from partial_fc.models.inputs import FACE
from partial_fc.optim import backbone as torch_optim
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.loop import compare_replicas
from partial_fc.train.precision import Precision


class Model:
    """A small one that has made an update, equal on all ranks."""

    def __init__(self, world, mode="fp32", kind="sgd"):
        torch.manual_seed(3)
        self.world = world
        module = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 36, 7, bias=False)
        ).to(memory_format=torch.channels_last)
        precision, make = Precision(mode, torch.device("cpu")), partial(torch_optim.build, kind, momentum=0.9)
        optimizer = partial(make, weight_decay=0.0)
        self.backbone = TorchBackbone(module, world, precision, optimizer, FACE, {})
        image = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(world.rank))
        self.backbone.zero(4 * world.size)
        output_B = self.backbone.forward(image.to(torch.uint8))
        output_B.square().sum().backward()
        self.backbone.backward(output_B.grad)
        self.backbone.wait()
        self.backbone.step(0.1)

    def check(self, **facts) -> None:
        table = SimpleNamespace(name="", facts=lambda: {"num_steps": 70, **facts})
        job = SimpleNamespace(
            world=self.world,
            backbone=self.backbone,
            head=SimpleNamespace(tables=lambda: {"": table}, state=dict),
            at=SimpleNamespace(step=70),
            guards=SimpleNamespace(last_equal=60),
        )
        compare_replicas(job)  # type: ignore[arg-type]
        assert job.guards.last_equal == 70


def flip_a_bit(t: torch.Tensor) -> None:
    """The lowest of its last value."""
    t.data.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize("mode", ["fp32", "fp16-o2"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_equal_replicas_pass_with_one_small_message(world, mode, kind):
    """Running statistics differ: they are each rank's own."""
    model = Model(world, mode, kind)
    with world.count_traffic() as traffic:
        model.check()
    assert dict(traffic.calls) == ({"train/replicas": 1} if world.size > 1 else {})
    assert traffic.num_bytes["train/replicas"] == (8 if world.size > 1 else 0)


@pytest.mark.parametrize(
    "where", ["weight 3.weight", "optimizer state 3.weight/momentum_buffer", "the head's num_steps"]
)
def test_a_single_bit_of_the_last_rank_is_found(world, where):
    model = Model(world)
    num_steps = 70
    parameter = dict(model.backbone.weights.named_parameters())["3.weight"]
    if world.rank == world.size - 1:
        if where.startswith("weight"):
            flip_a_bit(parameter)
        elif where.startswith("optimizer"):
            flip_a_bit(model.backbone.optimizer.state[parameter]["momentum_buffer"])
        else:
            num_steps = 71
    if world.size == 1:
        model.check(num_steps=num_steps)
        return
    who = "rank 0 and rank 1 differ" if world.size == 2 else f"rank {world.size - 1} differs from the other"
    with pytest.raises(ValueError, match=rf"step 70: .*diverged: {who}.*, in 1 of 12 .* {where}\. .* step after 60"):
        model.check(num_steps=num_steps)


def test_a_rank_without_optimizer_state_is_found(world):
    model = Model(world)
    if world.rank == 0 and world.size > 1:
        model.backbone.optimizer.state.clear()
    if world.size == 1:
        model.check()
        return
    with pytest.raises(ValueError, match="do not even hold tensors of the same names"):
        model.check()
