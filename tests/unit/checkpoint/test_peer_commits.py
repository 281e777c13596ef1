"""Commits in the memory of several hosts: whichever host is lost, the others have all of the state, bit by bit."""

import pytest
import torch

from partial_fc import checkpoint
from partial_fc.checkpoint import folders
from partial_fc.checkpoint.peer import commits, transfer
from partial_fc.checkpoint.peer import restore as recovery
from partial_fc.checkpoint.peer.commits import PeerCopies, ProcessState, peers
from partial_fc.checkpoint.peer.restore import choose, recover
from partial_fc.checkpoint.rows import Part, cut
from partial_fc.head import CosFace, HardNegatives, PartialFC
from partial_fc.head.rows import RowAdamW
from tests.flat import flat_head
from tests.unit.stored_checkpoints import one_step
from tests.unit.thread_world import in_world

C, D = 53, 6
EVERY = 4


def head_of(world) -> PartialFC:
    """Of most classes only some have been made after a few steps; rows have moments and ages."""
    return flat_head(
        C,
        D,
        CosFace(scale=8.0, margin=0.1),
        sample_rate=0.1,
        world=world,
        optimizer=RowAdamW(),
        hard_negatives=HardNegatives(C, k=2, every=1),
    )


def snapshot_of(head, world) -> checkpoint.Snapshot:
    step = head.num_steps
    return checkpoint.capture(
        step,
        {"w": torch.full((3, 2), float(step)), "count": torch.tensor(step)},
        {"momentum_buffer/w": torch.arange(6.0).view(3, 2) * step},
        {"buffer/mean": torch.full((4,), world.rank + 0.1)},
        head,
        {"position": step * 12, "best": {"lfw": 0.1 + 0.2}},
        world=world,
        checksums=True,
    )


def commit(memory, head, world) -> checkpoint.Snapshot:
    """Trains on while the copies travel; returns what was committed."""
    copies = PeerCopies(memory, world, EVERY)
    assert copies.due(head.num_steps) == (world.size > 1)
    snapshot = snapshot_of(head, world)
    copies.begin(snapshot)
    for _ in range(EVERY + 1):
        assert not copies.due(EVERY) or not copies.under_way
        copies.start_step()
        one_step(head, world, C, D)
        copies.end_step()
    assert not copies.under_way
    return snapshot


def created(head: PartialFC) -> torch.Tensor:
    return head.rows.created(head.rows.start, head.rows.stop)


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


def hosts(monkeypatch, *host_W: str) -> None:
    """The ranks of the next worlds are on these hosts."""
    monkeypatch.setattr(commits, "peers", lambda _: peers(host_W))


def test_the_peer_is_on_the_next_host():
    assert peers("aabb") == [2, 3, 0, 1]
    assert peers("aab") == [2, 2, 0]
    assert peers("abac") == [1, 3, 1, 0]
    assert peers("aaa") == [1, 2, 0]
    assert peers("a") == [0]


@pytest.mark.parametrize(
    ("host_W", "lost", "size"),
    [
        ("aab", "b", 2),
        ("aab", "a", 1),
        ("aab", "a", 3),  # others have come at once
        ("abc", "b", 2),
        ("aabb", "a", 2),
        ("a", "", 3),
        ("ab", "", 2),  # a false alarm: all are there again
    ],
)
def test_what_the_others_have_is_what_a_checkpoint_of_that_step_has(tmp_path, monkeypatch, host_W, lost, size):
    """... and they go on alike: rows, moments, ages, lists, running statistics."""
    hosts(monkeypatch, *host_W)
    for module in (commits, recovery, transfer):
        monkeypatch.setattr(module, "PIECE_BYTES", 700)
    monkeypatch.setattr(commits, "_SMALL_BYTES", 100)
    folder = tmp_path / folders.folder_name(3)

    def before(world):
        head, memory = head_of(world), ProcessState()
        for _ in range(3):
            one_step(head, world, C, D)
        snapshot = commit(memory, head, world)
        snapshot.write(folder, leads=world.rank == 0)
        return memory

    memories = in_world(len(host_W), before)
    folders.mark(folder, 3, range(len(host_W)))
    left = [memory for host, memory in zip(host_W, memories, strict=True) if host not in lost]
    left = (left + [ProcessState() for _ in range(size)])[:size]

    def after(world):
        recovered, found = recover(left[world.rank], world, tmp_path / "none"), checkpoint.Checkpoint(folder)
        assert recovered is not None
        assert recovered.step == 3
        assert recovered.manifest == found.manifest
        assert same(recovered.backbone(), found.backbone())
        assert same(recovered.optimizer(), found.optimizer())
        assert same(recovered.buffers(world), found.buffers(world))
        heads = head_of(world), head_of(world)
        notes, notes_found = recovered.load_head(heads[0]), found.load_head(heads[1])
        assert len(notes) == len(notes_found)
        for _ in range(3):
            assert same(heads[0].row_state(), heads[1].row_state())
            assert torch.equal(*(created(head) for head in heads))
            assert same(heads[0].hard_negatives.state(), heads[1].hard_negatives.state())
            assert heads[0].facts() == heads[1].facts()
            assert one_step(heads[0], world, C, D) == one_step(heads[1], world, C, D)
        assert 0 < int(created(heads[0]).sum()) < C
        return len(left[world.rank].commits)

    assert max(in_world(size, after)) == 1


def test_the_newest_commit_that_is_whole_somewhere_counts():
    def held(step, generation, size, *ranks):
        return {"step": step, "generation": generation, "world_size": size, "ranks": list(ranks), "leads": True}

    first = held(100, 0, 3, 0, 2), held(100, 0, 3, 1, 0)
    assert choose([[first[0]], [first[1]]]).holder_W == [0, 1, 0]
    newer = held(200, 0, 3, 0), held(200, 0, 3, 1)  # rank 2 was lost before its copy had come
    assert choose([[first[0], newer[0]], [first[1], newer[1]]]).step == 100
    assert choose([[first[0], newer[0]], [first[1], newer[1]], [held(200, 0, 3, 2)]]).step == 200
    assert choose([[first[0]], []]) is None
    assert choose([[], []]) is None
    again = held(100, 1, 2, 0), held(100, 1, 2, 1)
    found = choose([[], [first[0], again[0]], [first[1], again[1]]])
    assert (found.generation, found.holder_W, found.root) == (1, [1, 2], 1)


@pytest.mark.parametrize("made", [None, [10, 11, 15, 19], []])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_parts_name_every_class_once(monkeypatch, made, block):
    monkeypatch.setattr("partial_fc.checkpoint.rows._BLOCK", block)
    num = 10 if made is None else len(made)
    rows = {"centres": torch.arange(2.0 * num).view(num, 2)}
    if made is not None:
        rows["class"] = torch.tensor(made, dtype=torch.int64)
    parts = list(cut(Part(10, 20, rows), 11, 18, most_bytes=3 * 8))
    assert [part.start for part in parts] == [11, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == 18
    assert all(len(part.tensors["centres"]) <= 3 for part in parts)
    got = torch.cat([part.tensors["centres"] for part in parts])[:, 0].tolist()
    assert got == [float(2 * i) for i, c in enumerate(range(10, 20) if made is None else made) if 11 <= c < 18]


def test_a_snapshot_counts_with_the_shares_that_the_rank_keeps_for_others(monkeypatch):
    monkeypatch.setattr(commits, "available_memory_bytes", lambda: 400)

    def act(world):
        copies = PeerCopies(ProcessState(), world, EVERY)
        return [copies.can_copy(num_bytes) for num_bytes in (50, 51)]  # twice, in both processes: half of what is free

    assert in_world(2, act) == [[True, False]] * 2
