"""Precision modes on a GPU: as good as fp32, and an overflow skips the update."""

import pytest
import torch

from partial_fc.comm import SingleWorld
from tests.parallel.train.test_update import disturb, everything, job_of, make, micro_batches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp16-o2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_16_bits_learn_like_fp32(mode, accumulate):
    world = SingleWorld()
    narrow, wide = (job_of(world, kind, sample_rate=1.0, device="cuda") for kind in (mode, "fp32"))
    if narrow.backbone.scaler:
        narrow.backbone.scaler.scale = 1024.0
    batches = micro_batches(world, 0, accumulate)
    first = make(wide, batches)
    make(narrow, batches)
    for _ in range(19):
        ours, theirs = make(narrow, batches), make(wide, batches)
    assert theirs < 0.8 * first
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("compression", ["none", "2bit", "powersgd"])
def test_an_overflow_skips_the_update(compression):
    world = SingleWorld()
    job = job_of(world, "fp16", compression, device="cuda")
    job.backbone.scaler.scale = 256.0
    make(job, micro_batches(world, 0, 1))
    before = [t.clone() for t in everything(job)]
    handle = disturb(job, rank=0)
    make(job, micro_batches(world, 1, 1))
    handle.remove()
    assert job.backbone.scaler.scale == 128.0
    assert all(torch.equal(a, b) for a, b in zip(everything(job), before, strict=True))
