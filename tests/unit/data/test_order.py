"""Orders of samples: what stands at which position, for any number of ranks."""

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from partial_fc.data.order import Balanced, Blocks, Epochs, Keyed, Order, PerEpoch, Selection, Sharded


@pytest.fixture(autouse=True)
def few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are permuted at once otherwise would be hundreds of epochs of sets as small as here: a minute."""
    monkeypatch.setattr("partial_fc.data.order._AHEAD", 60)


def batches(order: Order, start: int, stop: int, batch_size: int, world_size: int) -> list[list[Selection]]:
    """From one position until another is reached: by batch, by rank."""
    found: list[list[Selection]] = []
    while start < stop:
        found.append([order.select(start, batch_size, rank, world_size) for rank in range(world_size)])
        start = found[-1][0].end
        assert {(one.end, one.ends_epoch, len(one.index_B)) for one in found[-1]} == {
            (start, found[-1][0].ends_epoch, len(found[-1][0].index_B))
        }
    return found


def indices(selections: list[Selection]) -> list[int]:
    return torch.cat([one.index_B for one in selections]).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [4, 10, 12, 31])
def test_per_epoch_is_torchs_distributed_sampler(num_samples, world_size):
    order = PerEpoch(num_samples, seed=5)
    samplers = [
        DistributedSampler(range(num_samples), world_size, rank, seed=5)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    for batch_size in (1, 3, 100):
        for epoch in range(3):
            found = batches(order, epoch * num_samples, (epoch + 1) * num_samples, batch_size, world_size)
            for rank, sampler in enumerate(samplers):
                sampler.set_epoch(epoch)
                assert indices([ranks[rank] for ranks in found]) == list(sampler)
            assert [ranks[0].ends_epoch for ranks in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_an_epoch_goes_on_with_another_number_of_ranks(before, after, num_batches):
    """Every sample of it is seen once, but for those that fill up its last batch."""
    num_samples, order = 31, PerEpoch(31, seed=0)
    first = batches(order, num_samples, 2 * num_samples, 3, before)[:num_batches]
    rest = batches(order, first[-1][0].end, 2 * num_samples, 2, after)
    together = batches(order, num_samples, 2 * num_samples, 1, 1)
    seen = Counter(index for ranks in (*first, *rest) for index in indices(ranks))
    assert seen.keys() == set(indices([ranks[0] for ranks in together])) == set(range(num_samples))
    assert seen.total() == num_samples + -(num_samples - num_batches * 3 * before) % after
    assert rest[-1][0].end == 2 * num_samples


@pytest.mark.parametrize("num_samples", [3, 10, 12])
@pytest.mark.parametrize(("num_shards", "local_size"), [(1, 1), (1, 2), (2, 1), (3, 1), (2, 3), (3, 2)])
def test_a_shard_reads_every_nth_sample_and_divides_its_batch(num_samples, num_shards, local_size):
    """As Caffe2's readers: a counter of each host, which returns to its first sample alone."""
    order, batch_size, world_size = Sharded(num_samples, num_shards), 2, num_shards * local_size
    found = batches(order, 0, 5 * num_samples, batch_size, world_size)
    for shard in range(num_shards):
        mine, read = list(range(shard, num_samples, num_shards)), 0
        for ranks in found:
            local = ranks[shard * local_size : (shard + 1) * local_size]
            of_host = [mine[(read + i) % len(mine)] for i in range(batch_size * local_size)]
            assert indices(local) == of_host
            assert [one.index_B.tolist() for one in local] == [
                of_host[i * batch_size : (i + 1) * batch_size] for i in range(local_size)
            ]
            read += batch_size * local_size
    positions = [position for ranks in found for one in ranks for position in one.position_B.tolist()]
    assert sorted(positions) == list(range(len(positions)))  # what is random differs between any two of them
    assert not any(one.ends_epoch for ranks in found for one in ranks)


def test_more_shards_than_samples():
    with pytest.raises(ValueError, match="2 samples for 3 shards: expected at least one for each"):
        Sharded(2, 3)


@pytest.mark.parametrize("size", [6, 12, 30])
def test_epochs_have_a_size_of_their_own(size):
    """Of whole updates: smaller and larger than the set."""
    inner = Sharded(10, 2)
    order = Epochs(inner, size)
    assert order.num_samples == size
    found = batches(order, 0, 60, 3, 2)
    assert [ranks[0].end for ranks in found if ranks[0].ends_epoch] == list(range(size, 61, size))
    assert [indices(ranks) for ranks in found] == [indices(ranks) for ranks in batches(inner, 0, 60, 3, 2)]
    for number, ranks in enumerate(found[:-1]):  # from any update on
        assert [indices(r) for r in batches(order, ranks[0].end, 60, 3, 2)] == [indices(r) for r in found[number + 1 :]]
    # An update that crosses an epoch's end, of another number of processes, ends it, too.
    assert [ranks[0].ends_epoch for ranks in batches(Epochs(inner, 6), 0, 12, 2, 2)] == [False, True, True]


@pytest.mark.parametrize(
    "order",
    [Keyed(31, 0), Sharded(31, 1), PerEpoch(31, 0), Epochs(Sharded(7, 1), 31)],
    ids=lambda order: type(order).__name__,
)
@pytest.mark.parametrize(("batch_size", "world_size"), [(4, 1), (2, 3), (31, 1)])
def test_updates_are_counted_as_they_are_made(order, batch_size, world_size):
    made = [ranks[0].end for ranks in batches(order, 0, 3 * 31, batch_size, world_size)]
    update_size = batch_size * world_size
    for number, position in enumerate((0, *made)):
        assert order.updates_at(position, update_size) == number
        assert order.updates_to(position, 3 * 31, update_size) == len(made) - number
    assert order.updates_to(made[-1], 31, update_size) == 0


@pytest.mark.parametrize("num_samples", [1, 7, 40, 100, 257])
def test_blocks_hold_every_sample_once_an_epoch_whatever_the_ranks(num_samples: int) -> None:
    order = Blocks(num_samples, 3, block=8, blocks_per_window=4)
    one = indices([order.select(start, 5, 0, 1) for start in range(0, 2 * num_samples + 5, 5)])
    for epoch in range(2):
        assert sorted(one[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
    assert num_samples < 40 or one[:num_samples] != one[num_samples : 2 * num_samples]
    three = [Blocks(num_samples, 3, block=8, blocks_per_window=4).select(0, 5, rank, 3) for rank in range(3)]
    assert indices(three) == [index for selection in three for index in selection.index_B.tolist()]
    assert indices(three)[: min(15, len(one))] == one[:15]


def test_a_window_reads_its_blocks_only_and_the_next_one_is_read_ahead() -> None:
    asked: list[tuple[int, int]] = []
    order = Blocks(100, 0, lambda first, stop: asked.append((first, stop)), block=8, blocks_per_window=4)
    for window, begin in enumerate((0, 32, 64)):  # the last one has the 4 blocks and 4 samples left over
        end = (32, 64, 100)[window]
        mine = {i for first, stop in order.blocks_of(window) for i in range(first, stop)}
        got = indices([order.select(position, 1, 0, 1) for position in range(begin, end)])
        assert set(got) == mine
        assert len(mine) == end - begin
        assert got != sorted(got)
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join()
    assert sorted(asked) == sorted(r for window in range(4) for r in order.blocks_of(window))


# ---- Balanced


SIZES = [1, 2, 4, 9, 25, 0, 7]


def balanced(power: float) -> tuple[Balanced, np.ndarray]:
    label_N = np.random.default_rng(0).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    return Balanced(label_N, 3, power), label_N


@pytest.mark.parametrize("power", [0, 0.5, 1])
def test_classes_come_in_proportion_to_a_power_of_their_size(power):
    order, label_N = balanced(power)
    weight_C = np.array([n**power if n else 0.0 for n in SIZES])
    share_C = weight_C / weight_C.sum() * len(label_N)
    total_C = np.zeros(len(SIZES))
    for epoch in range(40):
        start = epoch * len(label_N)
        label = label_N[indices([one[0] for one in batches(order, start, start + len(label_N), 1, 1)])]
        count_C = np.bincount(label, minlength=len(SIZES))
        assert (abs(count_C - share_C) < 1).all()
        total_C += count_C
    np.testing.assert_allclose(total_C / 40, share_C, atol=0.2)


def test_a_class_takes_its_samples_in_turn():
    order, label_N = balanced(0)  # 8 places an epoch, of which the class of 25 gets 8
    found = order.select(0, 25 * len(label_N), 0, 1).index_B.numpy()
    largest = Counter(found[label_N[found] == 4].tolist())
    assert len(largest) == 25
    assert max(largest.values()) - min(largest.values()) <= 2


def test_balanced_is_the_same_for_any_number_of_ranks():
    whole = balanced(0.5)[0].select(100, 60, 0, 1).index_B
    fresh = balanced(0.5)[0]  # as a resumed run has it
    parts = [fresh.select(100, 20, rank, 3).index_B for rank in range(3)]
    assert torch.cat(parts).equal(whole)
