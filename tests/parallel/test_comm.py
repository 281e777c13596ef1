"""Every collective, over whatever launched these processes."""

import pytest
import torch

from partial_fc.comm import CollectiveError, StartError, detect

pytestmark = pytest.mark.transport


def rows_of(rank: int) -> int:
    return rank + 2  # no two ranks bring the same number


def test_all_reduce_sums_and_takes_the_maximum(world):
    t = torch.arange(5, dtype=torch.float32) * (world.rank + 1)
    ranks = torch.arange(1, world.size + 1)
    assert torch.equal(world.all_reduce(t, name="t/sum"), torch.arange(5) * ranks.sum().float())
    assert torch.equal(world.all_reduce(t, "max", name="t/max"), torch.arange(5) * float(world.size))
    assert torch.equal(t, torch.arange(5, dtype=torch.float32) * (world.rank + 1)), "the input was written to"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.int32])
def test_all_reduce_keeps_the_dtype(world, dtype):
    total = world.all_reduce(torch.full((3, 2), world.rank + 1).to(dtype), name=f"t/{dtype}")
    assert total.dtype == dtype
    assert total.tolist() == [[sum(range(1, world.size + 1))] * 2] * 3


def test_all_reduce_in_place_writes_over_its_input(world):
    t = torch.ones(4)
    world.start_all_reduce(t, name="t/in_place", in_place=True).wait()
    assert t.tolist() == [world.size] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_what_some_backend_cannot_sum_is_refused_by_all(world, dtype):
    with pytest.raises(ValueError, match=f"t/bad: {dtype} is not summed"):
        world.all_reduce(torch.ones(2, dtype=dtype), name="t/bad")
    with pytest.raises(ValueError, match=f"t/bad: {dtype} is not summed"):
        world.start_reduce_scatter(torch.ones(world.size, dtype=dtype), [1] * world.size, name="t/bad")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_all_gather_of_uneven_rows_is_in_rank_order(world, dtype):
    rows = [rows_of(rank) for rank in range(world.size)]
    mine = torch.full((rows[world.rank], 3), world.rank).to(dtype)
    for known in (None, rows):
        got = world.start_all_gather(mine, known, name=f"t/gather{dtype}").wait()
        assert got.dtype == dtype
        assert got[:, 0].tolist() == [rank for rank in range(world.size) for _ in range(rows[rank])]


def test_all_gather_when_one_rank_has_no_rows(world):
    mine = torch.full((0 if world.rank == 0 else 2, 4), float(world.rank))
    got = world.all_gather(mine, name="t/empty")
    assert got.shape == (2 * (world.size - 1), 4)


@pytest.mark.parametrize("rows_of", [lambda rank: 3, rows_of, lambda rank: 0 if rank == 0 else 2])
def test_reduce_scatter_gives_each_rank_its_rows_of_the_sum(world, rows_of):
    rows = [rows_of(rank) for rank in range(world.size)]
    t = torch.arange(sum(rows), dtype=torch.float32)[:, None].expand(-1, 2) + world.rank
    got = world.start_reduce_scatter(t, rows, name=f"t/scatter{rows}").wait()
    before = sum(rows[: world.rank])
    want = torch.arange(before, before + rows[world.rank]) * world.size + sum(range(world.size))
    assert got.shape == (rows[world.rank], 2)
    assert torch.equal(got[:, 0], want.float())


def test_all_gather_of_rows_of_another_dtype_fails_on_every_rank(world):
    """Their bits would be read as other numbers, or gloo would end the process."""
    if world.size == 1:
        return
    mine = torch.ones(3, 2, dtype=torch.float64 if world.rank == 0 else torch.float32)
    with pytest.raises(CollectiveError, match="t/dtypes"):
        world.all_gather(mine, name="t/dtypes")
    world.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("even", [True, False])
def test_all_to_all_gives_each_rank_its_block_of_everyone(world, dtype, even):
    """Uneven: rank a has (a + 2 b) % 3 rows for rank b: some have none for themselves, some pairs none at all."""
    size, me = world.size, world.rank
    rows = [3 if even else (me + 2 * to) % 3 for to in range(size)]
    arriving = [3 if even else (of + 2 * me) % 3 for of in range(size)]
    t = torch.tensor([10 * me + to for to in range(size) for _ in range(rows[to])])[:, None].to(dtype)
    got = world.start_all_to_all(t, *(() if even else (rows, arriving)), name=f"t/to_all{dtype}{even}").wait()
    assert got.dtype == dtype
    assert got.tolist() == [[10 * of + me] for of in range(size) for _ in range(arriving[of])]


def test_rows_that_do_not_add_up_are_refused(world):
    size = world.size
    for start, said in (
        (lambda: world.start_all_gather(torch.ones(1, 2), [1] * (size + 1), name="t/wrong"), "must name"),
        (lambda: world.start_reduce_scatter(torch.ones(3, 1), [2] * size, name="t/wrong"), "add up"),
        (lambda: world.start_all_to_all(torch.ones(3, 1), [2] * size, [2] * size, name="t/wrong"), "add up"),
        (lambda: world.start_all_to_all(torch.ones(size, 1), [1] * size, name="t/wrong"), "neither"),
        (lambda: world.start_all_to_all(torch.ones(()), name="t/wrong"), "equal blocks"),
    ):
        with pytest.raises(ValueError, match=said):
            start()


def test_broadcast_from_any_root(world):
    for root in range(world.size):
        t = torch.full((2, 2), world.rank, dtype=torch.bfloat16)
        assert world.broadcast(t, root, name="t/broadcast").tolist() == [[root, root], [root, root]]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_broadcast_keeps_every_shape(world, dtype, shape):
    t = torch.full(shape, world.rank == 0).to(dtype)
    got = world.broadcast(t, name=f"t/broadcast{dtype}{shape}")
    assert (got.dtype, got.shape) == (dtype, shape)
    assert got.all()


def test_collectives_started_together_finish_in_any_order(world):
    first = world.start_all_reduce(torch.ones(1000), name="t/first")
    second = world.start_all_reduce(torch.ones(10) * 2, name="t/second")
    assert second.wait().tolist() == [2.0 * world.size] * 10
    assert first.wait().tolist() == [1.0 * world.size] * 1000


def test_traffic_is_counted_by_name(world):
    with world.count_traffic() as traffic:
        world.all_reduce(torch.ones(6), name="t/a")
        world.all_reduce(torch.ones(6), name="t/a")
        world.barrier(name="t/b")
    assert traffic.calls == {"t/a": 2, "t/b": 1}
    assert traffic.num_bytes["t/a"] == 48


def test_every_rank_is_watched_and_says_where_it_is(world):
    if world.size == 1:
        assert world._watch is None
        return
    world.step = 17
    world.all_reduce(torch.ones(2), name="t/watched")
    seen = world._watch.peer_states()
    assert [s.rank for s in seen] == list(range(world.size))
    assert all(s.answered and not s.has_ended and "t/watched" in s.state.started for s in seen), seen
    assert {s.state.step for s in seen} == {17}
    world.barrier(name="t/all_have_looked")
    world.step = 0


def test_ranks_count_collectives_alike_and_are_held_up_by_none(world):
    world.all_reduce(torch.ones(2), name="t/count")
    call = world.journal.newest
    counted = world.all_gather(torch.tensor([[call.nth, call.number]]), name="t/counted")
    assert counted.tolist() == [[call.nth, call.number]] * world.size
    assert not world.journal.in_flight


def test_ranks_without_a_gpu_among_others_are_named_on_all(world):
    """Over Horovod. (Over torch.distributed: tests/recipes/launchers/test_spawn.py.)"""
    if world.backend != "horovod" or world.size == 1:
        pytest.skip("needs two ranks of Horovod")
    from partial_fc.comm.horovod import HorovodWorld

    last = world.size - 1
    with pytest.raises(StartError, match=rf"^rank {world.rank} of .*: rank {last} of .* on the CPU, the others"):
        HorovodWorld(detect(), "cpu" if world.rank == last else "cuda")
    HorovodWorld(detect(), "cuda")
