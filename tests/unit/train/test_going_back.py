"""A rollback loads a checkpoint into a state that has been trained with: nothing of that state is left in it, and
nothing of what comes after a snapshot gets into that."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from partial_fc import checkpoint
from partial_fc.checkpoint.folders import mark
from partial_fc.comm import SingleWorld
from partial_fc.flags import RunFlags
from partial_fc.head import AdaFace, CosFace, HardNegatives, PartialFC
from partial_fc.optim.backbone import named_state
from partial_fc.train.job import Job
from partial_fc.train.loop import snapshot
from partial_fc.train.resume import restore
from tests.flat import flat_head
from tests.parallel.train.test_update import CLASSES, D, job_of, make, micro_batches
from tests.unit.train.test_face_start import run_of


def job() -> Job:
    """Whatever can be remembered is."""
    made = job_of(SingleWorld(), "fp16")
    lists = HardNegatives(CLASSES, k=2, every=1)
    made.head = flat_head(CLASSES, D, AdaFace(), sample_rate=0.3, world=made.world, hard_negatives=lists)
    return made


def go_back(job: Job, folder: Path) -> tuple[int, int] | None:
    flags = RunFlags(models_root=folder.parent / "run", resume=str(folder))
    run = run_of(job.world, SimpleNamespace(run=flags))
    with closing(checkpoint.Saver(flags.checkpoints, job.world, keep=3)) as saver:
        return restore(run, job.backbone, job.head, saver)


def everything(job: Job) -> tuple[dict[str, Tensor], object]:
    backbone = job.backbone
    tensors = {**backbone.weights.state_dict(), **named_state(backbone.optimizer, backbone.weights)}
    tensors |= {**job.head.row_state(), **job.head.hard_negatives.state()}
    return tensors, (job.head.facts(), backbone.scaler.state())


def test_what_the_checkpoint_lacks_is_as_at_the_start(tmp_path: Path):
    """It has weights and centres, and nothing else: what `checkpoint import` makes of another program's files."""
    folder = tmp_path / "step-00000003"
    weights = checkpoint.copied(job().backbone.weights.state_dict())
    given = PartialFC(CLASSES, D, CosFace(), sample_rate=0.3, seed=5)
    assert len(given.centres) == CLASSES
    checkpoint.capture(3, weights, {}, {}, given, {"position": 12}, world=SingleWorld()).write(folder, leads=True)
    mark(folder, 3, [0])

    trained, fresh = job(), job()
    trained.backbone.scaler.scale = 256.0
    for step in range(3):
        make(trained, micro_batches(trained.world, step, 1))
    assert trained.backbone.optimizer.state
    assert (trained.head.hard_negatives.state()["owner"] >= 0).any()
    for one in (trained, fresh):
        assert go_back(one, folder) == (3, 12)
    (found, facts), (want, want_facts) = everything(trained), everything(fresh)
    assert facts == want_facts
    assert found.keys() == want.keys()
    assert all(torch.equal(t, want[name]) for name, t in found.items())


def test_a_snapshot_says_what_was_when_it_was_taken():
    """It is written while training goes on."""
    one = job()
    taken = snapshot(one)
    one.at.best["lfw"] = 0.9
    one.at.left_out.append((0, 4))
    assert (taken.manifest["best"], taken.manifest["left_out"]) == ({}, [])
