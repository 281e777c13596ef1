import torch
from torch import Tensor, nn

from partial_fc.models import build
from partial_fc.optim.gradient_sync import GradientSync
from partial_fc.train import activation_checkpointing
from partial_fc.train.batch_norm import convert

D, SIDE = 16, 24


def two_batches(model: nn.Module, world) -> tuple[list[Tensor], list[Tensor], dict[str, int], int]:
    """Gradients of both summed over the ranks, buffers, and bytes by collective and calls: both forwards come before
    the backward, in which buckets leave while blocks are computed again."""
    sync = GradientSync(model, world, bucket_bytes=20_000)
    generator = torch.Generator().manual_seed(world.rank)
    loss = torch.zeros((), dtype=torch.float64)
    with world.count_traffic() as traffic:
        sync.zero()
        for _ in range(2):
            image = torch.randn(3 + world.rank, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
            loss = loss + model(image).square().sum()
        loss.backward()
        sync.wait()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, list(model.buffers()), dict(traffic.num_bytes), sum(traffic.calls.values())


def test_shared_batch_norms_send_nothing_twice_and_gradients_travel_meanwhile(world):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(convert(build("tiny", D, SIDE).double(), world))
    plain = two_batches(models[0], world)
    recomputed = two_batches(activation_checkpointing.enable(models[1]), world)
    for one, other in zip(recomputed[0], plain[0], strict=True):
        # Three ranks' numbers are added up in an order that depends on which buckets Horovod sends together.
        torch.testing.assert_close(one, other, rtol=1e-12 if world.size > 2 else 0, atol=1e-12 * (world.size > 2))
    for one, other in zip(recomputed[1], plain[1], strict=True):
        assert torch.equal(one, other)
    assert recomputed[2:] == plain[2:]
