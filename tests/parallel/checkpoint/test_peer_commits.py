"""Commits over real collectives; one rank then has forgotten all, as a new process has. (Worlds of other sizes:
tests/unit/checkpoint/test_peer_commits.py.)"""

import pytest
import torch

from partial_fc import checkpoint
from partial_fc.checkpoint.peer.commits import PeerCopies, ProcessState
from partial_fc.checkpoint.peer.restore import recover
from partial_fc.head import CosFace, PartialFC

C, D = 1000, 16


def head_of(world, seed: int) -> PartialFC:
    return PartialFC(C, D, CosFace(), sample_rate=0.2, world=world, seed=seed)


def step(head, world) -> None:
    made = torch.Generator().manual_seed(100 * head.num_steps + world.rank)
    feat_BD = torch.randn(4, D, generator=made).requires_grad_()
    head(feat_BD, torch.randint(0, C, (4,), generator=made)).backward()
    head.step(0.1)


def test_a_rank_that_has_forgotten_all_gets_it_from_the_others(world, tmp_path):
    if world.size == 1:
        pytest.skip("needs two ranks")
    head, memory = head_of(world, seed=0), ProcessState()
    step(head, world)
    local = {"exchange/residual/w": torch.full((3,), 0.1 + world.rank), "buffer/n": torch.tensor(world.rank)}
    tables = {"w": torch.arange(4.0)}, {"m/w": torch.ones(4).bfloat16()}, local
    taken = checkpoint.capture(1, *tables, head, {"position": 8}, world=world, checksums=True)
    copies = PeerCopies(memory, world, every=6)
    assert not copies.too_little_memory(head)
    copies.begin(taken)
    steps = 0
    while copies.under_way:
        copies.start_step()
        step(head, world)
        copies.end_step()
        steps += 1
    assert steps >= 2
    if world.rank == world.size - 1:
        memory = ProcessState()

    recovered = recover(memory, world, tmp_path)
    assert recovered is not None
    assert recovered.manifest["position"] == 8
    assert torch.equal(recovered.backbone()["w"], torch.arange(4.0))
    momentum = recovered.optimizer()["m/w"]
    assert momentum.dtype == torch.bfloat16
    assert momentum.tolist() == [1.0] * 4
    assert torch.equal(recovered.exchange(world)["residual/w"], torch.full((3,), 0.1 + world.rank))
    assert recovered.buffers(world)["n"].item() == world.rank
    again = head_of(world, seed=5)
    assert recovered.load_head(again) == []
    assert again.num_steps == 1
    rows = again.row_state()
    for part in taken.tables[""].parts:
        at_M = part.class_N - again.shard.start
        for name in rows:
            assert torch.equal(rows[name][at_M], part.rows[name])
    assert int(again.rows.created(again.rows.start, again.rows.stop).sum()) == sum(
        len(part.rows["centres"]) for part in taken.tables[""].parts
    )
