"""Each way to sum gradients over the ranks against its plain formula on all ranks' gradients, which each rank knows."""

import math

import pytest
import torch
from torch import Tensor, nn

from partial_fc.optim.gradient_sync import GradientSync

KINDS = ("none", "fp16", "bf16")
SHAPES = {
    "conv.weight": (7, 5, 3, 3),
    "conv.bias": (7,),
    "vector": (100,),
    "fc.weight": (33, 17),
    "slope": (1,),
    "unused": (3, 3),
}


class Rank:
    """Parameters with a sync, and gradients that are whatever the test says."""

    def __init__(self, world, kind, dtype=torch.float32, bucket_bytes=1500):
        self.named = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
        conv = self.named["conv.weight"]
        conv.data = conv.data.to(memory_format=torch.channels_last)
        self.sync = GradientSync(self.named.items(), world, bucket_bytes, kind)

    def backward(self, gradients: dict[str, Tensor], loss_scale: float = 1.0) -> None:
        loss = sum((self.named[name] * g).sum() for name, g in gradients.items() if name != "unused")
        (loss * loss_scale).backward()

    def update(self, gradients: dict[str, Tensor], loss_scale: float = 1.0) -> dict[str, Tensor]:
        self.sync.zero(loss_scale)
        self.backward(gradients, loss_scale)
        self.sync.wait()
        return {name: p.grad.clone() for name, p in self.named.items()}


def gradients(rank: int, step: int, dtype=torch.float32) -> dict[str, Tensor]:
    """Multiples of 1/64 in [-1, 1]: float16 and bfloat16 hold them, and float16 and float32 their sums."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = {name: torch.randint(-64, 65, shape, generator=generator).to(dtype) / 64 for name, shape in SHAPES.items()}
    return drawn | {"unused": torch.zeros(SHAPES["unused"], dtype=dtype)}


def all_gradients(world, step: int, dtype=torch.float32) -> list[dict[str, Tensor]]:
    return [gradients(rank, step, dtype) for rank in range(world.size)]


def assert_same_bits_everywhere(world, result: dict[str, Tensor]) -> None:
    bits = torch.cat([t.flatten() for t in result.values()]).view(torch.uint8)[None]
    everyones = world.all_gather(bits, name="test/bits")
    assert torch.equal(everyones, bits.expand_as(everyones))


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize("kind", KINDS)
def test_what_16_bits_hold_is_summed_as_if_sent_whole(world, kind, loss_scale):
    """bfloat16 sums come back in 8 bits; the others are exact. A loss scale of 1024 keeps float16 below 65504."""
    mine = Rank(world, kind)
    for step in range(2):
        result = mine.update(gradients(world.rank, step), loss_scale)
        assert_same_bits_everywhere(world, result)
        for name, t in result.items():
            expected = sum(g[name] for g in all_gradients(world, step))
            assert torch.equal(t, expected.bfloat16().float() if kind == "bf16" else expected), name


@pytest.mark.parametrize(("kind", "bits"), [("fp16", 11), ("bf16", 8)])
def test_16_bits_round_each_gradient_and_the_sums(world, kind, bits):
    everyones = [{name: g * math.pi / 3 for name, g in one.items()} for one in all_gradients(world, 0)]
    result = Rank(world, kind).update(everyones[world.rank])
    assert_same_bits_everywhere(world, result)
    for name, t in result.items():
        expected = sum(g[name].double() for g in everyones)
        largest = sum(g[name].double().abs() for g in everyones)
        assert ((t - expected).abs() <= world.size * 2.0**-bits * largest).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_four_held_backwards_are_one_of_their_sum(world, kind):
    held, summed = Rank(world, kind), Rank(world, kind)
    for step in (0, 4):
        parts = [gradients(world.rank, step + i) for i in range(4)]
        held.sync.zero()
        with world.count_traffic() as traffic:
            with held.sync.hold():
                for part in parts[:-1]:
                    held.backward(part)
            assert not traffic.calls
            held.backward(parts[-1])
            held.sync.wait()
        assert set(traffic.calls.values()) == {1}
        whole = summed.update({name: sum(part[name] for part in parts) for name in SHAPES})
        torch.testing.assert_close({name: p.grad for name, p in held.named.items()}, whole, rtol=0, atol=0)


def test_no_exchange_takes_more_bytes_than_it_says(world):
    handed_in = {}
    for kind in KINDS:
        with world.count_traffic() as traffic:
            Rank(world, kind, bucket_bytes=1 << 20).update(gradients(world.rank, 0))
        handed_in[kind] = traffic.num_bytes.total()
    n = sum(-(-math.prod(shape) // 16) * 16 for shape in SHAPES.values())
    assert handed_in["none"] == 4 * n
    assert handed_in["fp16"] == 2 * n
    block = -(-n // world.size)
    assert handed_in["bf16"] == 2 * block * world.size + 2 * block
