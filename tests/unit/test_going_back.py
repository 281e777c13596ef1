"""A rollback loads a checkpoint into a state that has been trained with: nothing of that state is left in it, and
nothing of what comes after a snapshot gets into that."""

import logging
from pathlib import Path

import pytest
import torch
from recipes.face_run import State, _load
from torch import Tensor

from partial_fc import checkpoint
from partial_fc.checkpoint.folders import mark
from partial_fc.comm import SingleWorld
from partial_fc.head import AdaFace, CosFace, HardNegatives, PartialFC
from partial_fc.optim.backbone import named_state
from partial_fc.train.job import Job
from partial_fc.train.loop import take
from tests.parallel.test_update import CLASSES, D, job_of, make, micro_batches


def job(compression: str) -> Job:
    """Whatever can be remembered is."""
    made = job_of(SingleWorld(), "fp16", compression)
    lists = HardNegatives(CLASSES, k=2, every=1)
    made.head = PartialFC(CLASSES, D, AdaFace(), sample_rate=0.3, world=made.world, hard_negatives=lists)
    return made


def state_of(job: Job) -> State:
    return State(job.weights, job.optimizer, job.head, job.sync, job.precision)


def everything(state: State) -> tuple[dict[str, Tensor], object]:
    assert state.precision.scaler
    assert state.head.hard_negatives
    tensors = {**state.weights.state_dict(), **named_state(state.optimizer, state.weights)}
    tensors |= {**state.sync.state(), **state.head.row_state(), **state.head.hard_negatives.state()}
    return tensors, (state.head.facts(), state.precision.scaler.state())


@pytest.mark.parametrize("compression", ["none", "2bit", "powersgd"])
def test_what_the_checkpoint_lacks_is_as_at_the_start(tmp_path: Path, compression: str):
    """It has weights and centres, and nothing else: what `checkpoint import` makes of another program's files."""
    folder = tmp_path / "step-00000003"
    weights = job(compression).weights.state_dict()
    given = PartialFC(CLASSES, D, CosFace(), sample_rate=0.3, seed=5)
    assert len(given.centres) == CLASSES
    checkpoint.take(3, weights, {}, {}, given, {"position": 12}, world=given.world).write(folder, leads=True)
    mark(folder, 3, [0])

    trained, fresh = job(compression), job(compression)
    assert trained.precision.scaler
    trained.precision.scaler.scale = 256.0
    for step in range(3):
        make(trained, micro_batches(trained.world, step, 1))
    assert trained.head.hard_negatives
    assert trained.optimizer.state
    assert (trained.head.hard_negatives.state()["owner"] >= 0).any()
    for one in (trained, fresh):
        _load(checkpoint.Checkpoint(folder), state_of(one), logging.getLogger("test"))
    (found, facts), (want, want_facts) = everything(state_of(trained)), everything(state_of(fresh))
    assert facts == want_facts
    assert found.keys() == want.keys()
    assert all(torch.equal(t, want[name]) for name, t in found.items())
    for name, t in job(compression).sync.state().items():
        assert torch.equal(found[name], t), name


def test_a_snapshot_says_what_was_when_it_was_taken():
    """It is written while training goes on."""
    one = job("none")
    taken = take(one)
    one.best["lfw"] = 0.9
    one.left_out.append((0, 4))
    assert (taken.manifest["best"], taken.manifest["left_out"]) == ({}, [])
