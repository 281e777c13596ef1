"""The backbone's gradient of W ranks is that of one process with the whole batch: who divides by what, pinned."""

import pytest
import torch
from torch import nn

from partial_fc import comm
from partial_fc.head import CosFace, PartialFC
from partial_fc.optim.gradient_sync import GradientSync, broadcast_module
from partial_fc.train.batch_norm import average_batch_norm

pytestmark = pytest.mark.transport


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


def test_a_layer_that_only_one_rank_uses_moves_on_all(world):
    module = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    sync = GradientSync(module, world, bucket_bytes=16)
    for _ in range(2):
        sync.zero()
        for name in ("used", "unused") if world.rank == 0 else ("used",):
            module[name](torch.full((1, 3), 1.0 + world.rank)).sum().backward()
            # (the second backward of rank 0 is of other parameters, in buckets that have not left)
        sync.wait()
        total = sum(1.0 + rank for rank in range(world.size))
        assert torch.equal(module["used"].weight.grad, torch.full((2, 3), total))
        assert torch.equal(module["unused"].weight.grad, torch.full((2, 3), 1.0))
        assert sync.square_sum().item() == 6 * total**2 + 2 * world.size**2 + 6 + 2


def small(dtypes=(torch.float32, torch.float32)) -> dict[str, nn.Parameter]:
    """Parameters (3, 4), alternating over the dtypes."""
    return {f"p{i}": nn.Parameter(torch.ones(3, 4, dtype=dtypes[i % len(dtypes)])) for i in range(6)}


def backward(named, factor=1.0):
    sum(factor * p.float().sum() for p in named.values()).backward()


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_leave_during_backward_unless_told_otherwise(world, overlap):
    named = small()
    sync = GradientSync(named.items(), world, bucket_bytes=100, overlap=overlap)
    for _ in range(2):
        sync.zero(loss_scale=4.0)
        with world.count_traffic() as traffic:
            backward(named, 4.0)
            assert len(traffic.calls) == (3 if overlap else 0)
            sync.wait()
        assert traffic.calls == {f"backbone/gradient_{i}": 1 for i in range(3)}
        assert all(torch.equal(p.grad, torch.full((3, 4), float(world.size))) for p in named.values())
        assert traffic.num_bytes.total() == 6 * 16 * 4  # with what fills up a parameter's last cache line


def test_layers_of_two_dtypes_share_two_buckets_that_leave_as_they_fill(world):
    """Not one a layer; and the one that fills up first leaves first, whichever was opened first."""
    named = small((torch.float16, torch.float32))
    sync = GradientSync(named.items(), world, bucket_bytes=1 << 20)
    sync.zero()
    with world.count_traffic() as traffic:
        backward(named)
        sync.wait()
    # Backward ends with p0, of float16; 48 values with what fills up their cache lines.
    assert dict(traffic.num_bytes) == {"backbone/gradient_0": 48 * 4, "backbone/gradient_1": 48 * 2}
    for p in named.values():
        total = sync.gradient_of[p]
        assert total.dtype == torch.float32
        assert torch.equal(total, torch.full((3, 4), float(world.size)))
    assert sync.square_sum() == 6 * 12 * world.size**2


def test_a_second_backward_without_hold_is_refused(world):
    named = small()
    sync = GradientSync(named.items(), world, bucket_bytes=100)
    backward(named)
    with pytest.raises(ValueError, match="arrived after this bucket had left"):
        backward(named)
    sync.wait()
    with pytest.raises(ValueError, match="arrived after this bucket had left"):
        backward(named)


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
