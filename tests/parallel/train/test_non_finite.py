"""Numbers that are not finite: all ranks name the same tensor, and do the same about it."""

import json
from types import SimpleNamespace

import pytest
import torch

from partial_fc.comm import all_gather_json
from partial_fc.head import CosFace, HardNegatives
from partial_fc.head.shard import Shard
from partial_fc.train.batch_norm import convert
from partial_fc.train.guards.policy import NonFinite, roll_back
from partial_fc.train.job import Job
from tests.flat import flat_head
from tests.parallel.train.test_update import CLASSES, D, disturb, everything, make, micro_batches
from tests.parallel.train.test_update import job_of as update_job_of


@pytest.fixture
def job_of(world, tmp_path):
    """test_update.job_of, with a folder of each rank's own."""

    def make_job(*given, **more) -> Job:
        job = update_job_of(world, *given, **more)
        job.models_root = tmp_path / f"rank{world.rank}"
        return job

    return make_job


def spoil_output(job, place: int, rank: int, value=torch.nan):
    """This module's output has a value that is not finite on that rank."""

    def hook(_module, _input, output):
        if job.world.rank == rank:
            output = output.clone()
            output.view(-1)[3] = value
        return output

    return job.backbone.module[place].register_forward_hook(hook)


def message_of(job, batches, world) -> str:
    """Of the error that the update raises, equal on all ranks."""
    with pytest.raises(NonFinite) as error:
        make(job, batches)
    words = str(error.value).replace(str(job.models_root), "ROOT")
    assert set(all_gather_json(words, world, "t/message")) == {words}
    return words


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_module_whose_output_was_first_is_named(world, job_of, mode):
    job = job_of(mode)
    last = world.size - 1
    spoil_output(job, 2, last)
    batches = micro_batches(world, 0, 1)
    statistics = [b.clone() for b in job.backbone.module[1].buffers()]
    before = everything(job)
    text = message_of(job, batches, world)
    assert text.startswith("the loss is nan at step 1 (usual causes: ")
    assert f"on rank {last}: the output of module 2 (ReLU): 1 of 216 values" in text
    assert "Nothing was updated in this step" in text
    assert "ROOT/non-finite/step-00000001-rank-*.json" in text
    for a, b in zip([*job.backbone.weights.state_dict().values()][-2:], before[-3:-1], strict=True):
        assert torch.equal(a, b)
    # one forward counts, the second look does not
    assert int(job.backbone.module[1].num_batches_tracked) == int(statistics[2]) + 1

    found = json.loads((job.models_root / f"non-finite/step-00000001-rank-{world.rank:05d}.json").read_text())
    assert (found["step"], found["rank"], found["loss"]) == (1, world.rank, "nan")
    assert found["micro_batches"][0]["keys"] == batches[0].key_B.tolist()
    assert found["micro_batches"][0]["labels"] == batches[0].label_B.tolist()
    assert (found["first_on_this_rank"] is not None) == (world.rank == last)


def test_a_weight_is_named_before_what_it_spoils(world, job_of):
    job = job_of()
    with torch.no_grad():
        job.backbone.module[1].bias[2] = torch.inf
    text = message_of(job, micro_batches(world, 0, 1), world)
    ranks = "" if world.size == 1 else f" (and on {world.size - 1} other{'s' if world.size > 2 else ''})"
    assert f"on rank 0{ranks}: weight 1.bias: 1 of 6 values, the largest of the others 0." in text


@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
def test_a_centre_is_named_by_its_class(world, job_of, sample_rate):
    job = job_of(sample_rate=sample_rate)
    batches = micro_batches(world, 0, 1)
    label_G = world.all_gather(batches[0].label_B, name="t/labels")
    bad = int(label_G.max())  # takes part, whatever is sampled
    shard = job.head.shard
    shards = [Shard.of(CLASSES, rank, world.size) for rank in range(world.size)]
    (rank_of_bad,) = (rank for rank, of in enumerate(shards) if of.start <= bad < of.stop)
    job.head.all_rows = job.head.centres  # they are made where they are needed
    if shard.start <= bad < shard.stop:
        job.head.store.centre_LD[bad - shard.start, 5] = torch.nan
    text = message_of(job, batches, world)
    assert f"on rank {rank_of_bad}: the centres of classes {bad}." in text


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_is_named_by_rank_and_parameter(world, job_of, clip):
    """The loss is fine."""
    job = job_of(clip=clip)
    before = everything(job)
    disturb(job, world.size - 1)
    text = message_of(job, micro_batches(world, 0, 1), world)
    assert text.startswith("the backbone's gradient is not finite at step 1")
    assert f"on rank {world.size - 1}: the gradient of 0.weight: 162 of 162 values" in text
    assert "Nothing was updated" in text
    named = dict(job.backbone.weights.named_parameters())
    for (name, a), b in zip(job.backbone.weights.state_dict().items(), before[:-1], strict=True):
        if name in named:
            assert torch.equal(a, b)
    assert torch.equal(job.head.centres, before[-1])


def test_a_rank_with_a_broken_centre_takes_part_in_the_others_batch_norm(world, job_of):
    """In the second look, which costs collectives with a batch norm over all ranks."""
    job = job_of(sample_rate=1.0)
    convert(job.backbone.module, world)
    batches = micro_batches(world, 0, 1)
    job.head.all_rows = job.head.centres  # they are made where they are needed
    if world.rank == 0:
        job.head.store.centre_LD[0, 5] = torch.nan
    with world.count_traffic() as traffic:
        assert "on rank 0: the centres of classes 0." in message_of(job, batches, world)
    assert traffic.calls["sync_bn/1/forward"] == 2, "the update's, and the second look's"


def test_a_fault_that_does_not_come_again_is_said_to_be_one(world, job_of):
    job = job_of()
    calls = []

    def once(_module, _input, output):
        calls.append(1)
        return output * torch.nan if len(calls) == 1 and world.rank == 0 else output

    job.backbone.module[4].register_forward_hook(once)
    batches = micro_batches(world, 0, 1)
    key = int(world.broadcast(batches[0].key_B[:1], name="t/key"))
    text = message_of(job, batches, world)
    assert f"on rank 0: the features of record {key}, while a second forward" in text
    assert "(a faulty memory or processor?)." in text


# ---- skip


def all_of(job) -> list[torch.Tensor]:
    return [*everything(job), *job.head.hard_negatives.state().values()]


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_update_leaves_no_trace(world, job_of, how, accumulate):
    plain, disturbed = (job_of() for _ in range(2))
    for job in (plain, disturbed):
        lists = HardNegatives(CLASSES, k=2, every=1)
        job.head = flat_head(CLASSES, D, CosFace(16.0), 0.3, world, seed=1, hard_negatives=lists)
        job.guards.on_nan = "skip"
        make(job, micro_batches(world, 0, accumulate))
    before = [t.clone() for t in all_of(disturbed)]
    last = world.size - 1
    handle = disturb(disturbed, last) if how == "gradient" else spoil_output(disturbed, 0, last)
    make(disturbed, micro_batches(world, 7, accumulate))
    if handle:
        handle.remove()
    for a, b in zip(all_of(disturbed), before, strict=True):
        assert torch.equal(a, b)
    assert disturbed.guards.num_skips == 1
    for job in (plain, disturbed):
        make(job, micro_batches(world, 1, accumulate))
    assert disturbed.guards.num_skips == 0
    allowed = 0.0 if world.size < 3 else 1e-5  # Horovod's order of three summands
    for a, b in zip(all_of(disturbed), all_of(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)


# ---- with a loss scale


def test_an_overflow_is_no_fault_but_at_the_smallest_scale_it_is(world, job_of):
    job = job_of("fp16")
    job.backbone.scaler.scale = 2.0
    disturb(job, 0)
    make(job, micro_batches(world, 0, 1))
    assert job.backbone.scaler.scale == 1.0
    assert not (job.models_root / "non-finite").exists()
    text = message_of(job, micro_batches(world, 0, 1), world)
    assert "not finite at loss scale 1, after one halving an update" in text
    assert "(step 2)" in text
    assert "on rank 0: the gradient of 0.weight" in text


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_weights_that_are_not_finite_are_a_fault_at_any_scale(world, job_of, on_nan):
    job = job_of("fp16")
    job.guards.on_nan = on_nan
    with torch.no_grad():
        dict(job.backbone.weights.named_parameters())["4.weight"][0, 0] = torch.nan
    text = message_of(job, micro_batches(world, 0, 1), world)
    assert "weight 4.weight: 1 of 432 values" in text
    assert ("--on-nan skip cannot help: every batch would meet it" in text) == (on_nan == "skip")


# ---- rollback


def test_what_a_rollback_needs(world, job_of):
    """The loop's part is in tests/recipes/face/test_guards.py."""
    job = job_of()
    job.at.step, fault = 9, NonFinite("the loss is nan at step 10.")
    went = []
    job.loader = SimpleNamespace(seek=went.append)  # type: ignore[assignment]
    with pytest.raises(NonFinite, match=r"at step 10\.$"):
        roll_back(job, fault, 200)
    job.guards.on_nan = "rollback"
    job.guards.restore = lambda: None
    with pytest.raises(NonFinite, match="there is no checkpoint yet"):
        roll_back(job, fault, 200)
    for start, position, left_out in (
        ((4, 80), 200, [(80, 200)]),
        ((4, 80), 300, [(80, 300)]),  # the same checkpoint: no sample is left out twice
        ((9, 400), 500, [(80, 300), (400, 500)]),
    ):
        job.guards.restore = lambda start=start: start
        roll_back(job, fault, position)
        assert (job.at.step, job.at.position, went[-1], job.at.left_out) == (start[0], position, position, left_out)
        assert job.guards.last_equal == start[0]
    with pytest.raises(NonFinite, match="rolled back 3 times"):
        roll_back(job, fault, 600)
