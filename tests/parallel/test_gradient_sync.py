"""The backbone's gradient of W ranks is that of one process with the whole batch: who divides by what, pinned."""

import pytest
import torch
from torch import nn

from partial_fc import comm
from partial_fc.head import CosFace, PartialFC
from partial_fc.optim.gradient_sync import GradientSync, average_batch_norm, broadcast_module


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.PReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 6, 16)
    ).double()


def global_batch(rows):
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(sum(rows), 3, 11, 9, generator=generator, dtype=torch.float64)
    return image, torch.randint(0, 50, (sum(rows),), generator=generator)


def one_backward(module, sync, world, image, label):
    head = PartialFC(50, 16, CosFace(), world=world)
    sync.zero()
    feat = module(image)
    leaf = feat.detach().requires_grad_()
    head(leaf, label).backward()
    feat.backward(leaf.grad)
    sync.wait()
    return [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("bucket_bytes", [1, 600, 4 << 20])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradient_equals_that_of_one_process(world, bucket_bytes, channels_last):
    rows = [3 + rank for rank in range(world.size)]
    image, label = global_batch(rows)
    part = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
    sharded, alone = network(), network()
    if channels_last:
        sharded = sharded.to(memory_format=torch.channels_last)
    ours = GradientSync(sharded, world, bucket_bytes)
    theirs = GradientSync(alone, comm.SingleWorld())
    for _ in range(2):  # the second backward must not add to the first
        mine = one_backward(sharded, ours, world, image[part], label[part])
        whole = one_backward(alone, theirs, comm.SingleWorld(), image, label)
        for a, b in zip(mine, whole, strict=True):
            # The head computes in float32.
            assert (a - b).abs().max() < 1e-5 * b.abs().max()
    assert abs(ours.square_sum() - theirs.square_sum()) < 1e-4 * theirs.square_sum()


def test_scale_multiplies_the_gradients(world):
    module = network()
    sync = GradientSync(module, world)
    image, label = global_batch([4])
    before = one_backward(module, sync, world, image, label)
    norm = sync.square_sum().sqrt()
    sync.scale(0.25)
    for p, grad in zip(module.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad * 0.25)
    torch.testing.assert_close(sync.square_sum().sqrt(), norm * 0.25)


def test_parameters_that_took_no_part_have_gradient_zero(world):
    module = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    sync = GradientSync(module, world, bucket_bytes=8)
    for _ in range(2):
        sync.zero()
        module["used"](torch.ones(2, 4)).sum().backward()
        sync.wait()
    assert torch.count_nonzero(module["unused"].weight.grad) == 0
    assert torch.equal(module["used"].bias.grad, torch.full((4,), 2.0 * world.size))


def test_broadcast_makes_all_ranks_start_like_rank_0(world):
    module = nn.Sequential(network(seed=world.rank), nn.BatchNorm1d(16))
    module[1].num_batches_tracked += world.rank
    broadcast_module(module, world)
    assert torch.equal(module[0][0].weight, network(seed=0)[0].weight)
    assert module[1].num_batches_tracked.item() == 0


def test_running_statistics_are_joined_as_those_of_the_whole(world):
    """Ranks that saw equally much: joined mean and variance are those of all values together."""
    layer = nn.BatchNorm1d(5)
    values = torch.randn(world.size, 1000, 5, generator=torch.Generator().manual_seed(0)).double()
    values += torch.arange(world.size)[:, None, None]
    layer.running_mean.copy_(values[world.rank].mean(0))
    layer.running_var.copy_(values[world.rank].var(0, correction=0))
    average_batch_norm(nn.Sequential(layer), world)
    together = values.flatten(0, 1)
    torch.testing.assert_close(layer.running_mean, together.mean(0).float())
    torch.testing.assert_close(layer.running_var, together.var(0, correction=0).float(), rtol=1e-5, atol=1e-5)
