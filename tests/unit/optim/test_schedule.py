import math
from types import SimpleNamespace

import pytest

from partial_fc.comm import SingleWorld
from partial_fc.data.order import Keyed, PerEpoch
from partial_fc.flags import OptimFlags, ScheduleFlags
from partial_fc.optim.schedule import Schedule, continued, linear_scaling
from partial_fc.train.begin import course
from partial_fc.train.job import RunState
from partial_fc.train.resume import Start
from tests.unit.train.test_face_start import run_of


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        # MXNet's step 10 takes effect at update 11, counted from 1: ten full rates before it.
        ({"decay_steps": (10, 20), "total_steps": 40}, [1.0] * 10 + [0.1] * 10 + [0.01] * 20),
        # Caffe2's LearningRate: gamma ** (iteration // stepsize), in floats, the first iteration being 1.
        ({"decay_every": 10, "total_steps": 40}, [0.1 ** (iteration // 10) for iteration in range(1, 41)]),
        ({"warmup_steps": 4, "decay_steps": (5,), "factor": 0.5}, [0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.5, 0.5, 0.5]),
        ({"kind": "constant", "warmup_steps": 3, "warmup_start": 0.25}, [0.25, 0.5, 0.75, *[1.0] * 6]),
        ({"kind": "cosine", "warmup_steps": 1}, [0, *((1 + math.cos(math.pi * n / 8)) / 2 for n in range(8))]),
    ],
    ids=str,
)
def test_rates_of_steps_and_warm_ups(given, rates):
    schedule = Schedule(**{"kind": "step", "base_lr": 1.0, "total_steps": 9, **given})
    assert [schedule.lr(step) for step in range(schedule.total_steps)] == pytest.approx(rates, rel=1e-12)


def test_polynomial_is_the_closed_form_of_arcface_torch():
    base, total, warm = 0.1, 100, 10
    schedule = Schedule(kind="polynomial", base_lr=base, total_steps=total, warmup_steps=warm)
    for step in range(total + 1):
        expected = base * step / warm if step <= warm else base * (1 - (step - warm) / (total - warm)) ** 2
        assert schedule.lr(step) == pytest.approx(expected)
    assert schedule.lr(warm) == base
    assert schedule.lr(total) == 0.0
    assert Schedule(kind="polynomial", base_lr=1.0, total_steps=4, power=1.0).lr(3) == 0.25


@pytest.mark.parametrize("step", [-1, 11])
def test_a_step_outside_the_training_is_an_error(step):
    with pytest.raises(ValueError, match=f"step is {step}, expected 0 to total_steps, 10"):
        Schedule(kind="cosine", base_lr=0.1, total_steps=10).lr(step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "exponential"}, "'exponential', expected constant, step"),
        ({"base_lr": math.nan}, "base_lr is nan"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"warmup_steps": 10}, "training ends before the warm-up"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"warmup_start": 0.5}, "warmup_start is 0.5, expected 0 to base_lr, 0.1"),
        ({"kind": "step"}, "needs one or more"),
        ({"decay_steps": (3,)}, "decay steps belong to schedule 'step'"),
        ({"kind": "step", "decay_steps": (5, 3)}, "strictly increasing"),
        ({"kind": "step", "decay_steps": (0, 3)}, "positive"),
        ({"kind": "step", "decay_steps": (3,), "warmup_steps": 5}, "inside the warm-up of 5"),
        ({"kind": "step", "decay_every": 5, "warmup_steps": 5}, "4, lies inside the warm-up of 5"),
        ({"kind": "step", "decay_steps": (3,), "decay_every": 5}, "or else decay_every"),
        ({"kind": "step", "decay_every": -5}, "decay_every -5"),
        ({"decay_every": 5}, "decay steps belong to schedule 'step'"),
        ({"factor": 1.0}, "factor is 1.0"),
        ({"power": 0.0}, "power is 0.0"),
    ],
)
def test_contradictions_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**({"kind": "cosine", "base_lr": 0.1, "total_steps": 10} | change))


def test_linear_scaling_shows_its_arithmetic():
    lr, sentence = linear_scaling(0.1, base_batch=512, global_batch=128)
    assert lr == pytest.approx(0.025)
    assert sentence.startswith("learning rate 0.025 = 0.1 * 128 / 512")
    assert linear_scaling(0.1, 512, 512)[0] == 0.1
    with pytest.raises(ValueError, match="base batch 0"):
        linear_scaling(0.1, 0, 128)


def test_a_course_goes_on_at_the_same_share_of_the_data_with_steps_of_another_size():
    """1,000 samples, of which 400 were seen by steps of 20; then 50 a step."""
    course = Schedule(kind="polynomial", base_lr=1.0, total_steps=20, power=1.0)  # of steps of 50
    schedule = continued(course, step=20, left=12, shift=400 / 50 - 20)
    assert schedule.total_steps == 20 + 12
    assert schedule.lr(20) == pytest.approx(0.6)  # of a run that always had steps of 50, the 9th
    assert schedule.lr(31) == pytest.approx(1 / 20)
    assert schedule.lr(32) == 0.0
    # and back again, in the midst of it
    course = Schedule(kind="polynomial", base_lr=1.0, total_steps=50, power=1.0)
    again = continued(course, step=22, left=25, shift=510 / 20 - 22)
    assert again.total_steps == 22 + 25
    assert again.lr(22) == pytest.approx(0.49)
    assert again.lr(46) == pytest.approx(0.01)


def test_decays_of_a_continued_course_count_updates():
    course = Schedule(kind="step", base_lr=1.0, total_steps=20, decay_steps=(25,))
    schedule = continued(course, step=20, left=12, shift=400 / 50 - 20)
    assert schedule.total_steps == 32
    assert [schedule.lr(step) for step in (20, 24, 25, 31)] == pytest.approx([1.0, 1.0, 0.1, 0.1])


def test_decays_every_so_many_epochs_follow_the_data():
    """1,000 samples an epoch, of which 400 were seen by steps of 20; then 50 a step."""
    course = Schedule(kind="step", base_lr=1.0, total_steps=40, decay_every=20)
    schedule = continued(course, step=20, left=32, shift=400 / 50 - 20)
    rates = [schedule.lr(step) for step in range(20, 52)]
    assert rates == pytest.approx([1.0] * 11 + [0.1] * 20 + [0.01])


def schedule_of(start: RunState, order, batch_size: int = 10, accumulate: int = 1, **flags):
    """Of two epochs of 500 images."""
    given = ScheduleFlags(**{"epochs": 2.0, "lr_scheduler": "constant", "lr_scaling": "none", **flags})
    config = SimpleNamespace(optim=OptimFlags(batch_size=batch_size, accumulate=accumulate), schedule=given)
    return course.schedule(run_of(SingleWorld(), config), Start(start), order, "samples")


def test_a_run_of_epochs_goes_on_by_the_data_that_is_left(caplog):
    """Data left out by a rollback was not seen; with --max-steps, and with steps as before, nothing changes."""
    caplog.set_level("INFO")
    order = Keyed(500, seed=0)
    rolled_back = RunState(step=30, position=340, left_out=[(290, 330)])
    for start in (RunState(step=30, position=300), rolled_back):
        for flags in ({}, {"max_steps": 100}):
            course = schedule_of(start, order, **flags)
            assert isinstance(course, Schedule)
            assert course.total_steps == 100
    assert "have been seen" not in caplog.text
    assert schedule_of(rolled_back, order, batch_size=20).total_steps == 30 + 35
    for words in ("300 of 1,000 samples", "30 steps", "with 20 a step 35 more remain"):
        assert words in caplog.text
    assert schedule_of(rolled_back, order, batch_size=20, max_steps=100).total_steps == 100
    with pytest.raises(ValueError, match="step 101, beyond this run's 100"):
        schedule_of(RunState(step=101, position=1), order, max_steps=100)


def test_epochs_that_end_in_a_smaller_batch_count_as_they_are_stepped():
    """An epoch of 500 has 21 updates of 24; at its end, and within the next, another size goes on."""
    order = PerEpoch(500, seed=0)
    for start, size, total in (
        (RunState(step=21, position=500), 24, 42),
        (RunState(step=24, position=572), 24, 42),
        (RunState(step=21, position=500), 50, 21 + 10),
        (RunState(step=24, position=572), 50, 24 + 9),  # 428 images are left
    ):
        schedule = schedule_of(start, order, batch_size=size)
        assert schedule.total_steps == total
        assert isinstance(schedule, Schedule) == (size == 24)


def test_a_tenth_every_so_many_epochs_as_caffe2_counts_them(caplog):
    """int(30 * epoch_size / batch) updates; here 0.5 epochs of 500 images in steps of 10."""
    course = schedule_of(RunState(), Keyed(500, 0), lr=0.1, lr_scheduler="step", lr_step_epochs=0.5)
    assert [course.lr(step) for step in (0, 23, 24, 48, 49, 99)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-5])
    assert "count updates" not in caplog.text


def test_goyals_warm_up_begins_with_the_unscaled_rate():
    """8 times the batch: from 0.1 to 0.8 in the first 1 of 2 epochs, in equal steps."""
    flags = {"lr": 0.1, "lr_scaling": "linear", "base_batch_size": 5, "warmup_epochs": 1.0, "warmup_lr": 0.1}
    course = schedule_of(RunState(), Keyed(500, 0), batch_size=40, **flags)
    assert course.warmup_steps == 12
    assert [course.lr(step) for step in (0, 6, 12, 20)] == pytest.approx([0.1, 0.45, 0.8, 0.8])


def arcface_torch_rates(warmup: int, total: int) -> list[float]:
    """Of the micro-batches of a run, by the recursion of its PolynomialLRWarmup: after step 0, the rate of a step is
    that of the one before times the ratio of two polynomials."""
    rates = [1.0]
    for step in range(1, total):
        left, before = (1 - (at - warmup) / (total - warmup) for at in (step, step - 1))
        rates.append(step / warmup if step <= warmup else rates[-1] * left / before)
    return rates


@pytest.mark.parametrize(("accumulate", "warmup"), [(1, 0.0), (1, 1.0), (4, 1.0)])
def test_arcface_torchs_rates_and_lengths(accumulate, warmup):
    """507 images, 10 in a batch: 50 whole batches an epoch; the first micro-batch of all has the full rate."""
    flags = {"lr": 1.0, "lr_scheduler": "arcface-torch", "warmup_epochs": warmup, "accumulate": accumulate}
    course = schedule_of(RunState(), Keyed(507, 0), **flags)
    expected = arcface_torch_rates(round(50 * warmup), 100)[accumulate - 1 :: accumulate]
    assert course.total_steps == len(expected) == 100 // accumulate
    assert [course.lr(step) for step in range(course.total_steps)] == pytest.approx(expected, rel=1e-12)
    assert expected[0] == (1.0 if accumulate == 1 else 3 / 50)
    assert course.lr(course.total_steps) == 0.0


def test_less_data_than_a_batch_makes_no_step_of_arcface_torch():
    with pytest.raises(ValueError, match=r"7 samples make no update of 10 .*--batch-size.*--lr-scheduler polynomial"):
        schedule_of(RunState(), Keyed(7, 0), lr_scheduler="arcface-torch")


def test_two_ways_to_say_where_the_rate_falls_are_refused():
    with pytest.raises(ValueError, match="--lr-steps and --lr-step-epochs"):
        ScheduleFlags(lr_scheduler="step", lr_steps=(5,), lr_step_epochs=30)
