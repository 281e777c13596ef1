"""Flags of recipe `face` that shape the head: what they make."""

import re
import shlex

import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.head import ArcFace, CosFace, PartialFC, Steps
from partial_fc.head.kernels.choice import auto_precision
from partial_fc.head.margin import CombinedMargin
from partial_fc.head.margin_adaptive import AdaFace
from partial_fc.head.margin_curricular import CurricularFace
from partial_fc.train import head_from_flags
from partial_fc.train.precision import Mode, Precision
from recipes.face.main import Config, parse
from tests.flat import flat_head


def config(flags: str) -> Config:
    return parse(["--dataset", "synthetic", "--num-classes", "50", *shlex.split(flags)])[0]


def head_of(flags: str) -> PartialFC:
    return build(config(f"--head-impl plain --precision fp32 {flags}"))


def build(given: Config, mode: Mode = "fp32") -> PartialFC:
    precision = Precision(mode, torch.device("cpu"))
    return head_from_flags.build(given.head, 50, 8, SingleWorld(), precision, given.optim, seed=0)


@pytest.mark.parametrize(
    ("flags", "margin"),
    [
        ("", CombinedMargin(64.0, m3=0.4)),
        ("--loss arcface --scale 32", CombinedMargin(32.0, m2=0.5)),
        ("--loss softmax", CombinedMargin(64.0)),
        ("--loss combined --margins 1.2 0.1 0.2", CombinedMargin(64.0, 1.2, 0.1, 0.2)),
        ("--loss adaface", AdaFace(64.0, m=0.4, h=0.333)),
        ("--loss curricularface", CurricularFace(64.0, m=0.5)),
    ],
)
def test_every_loss_has_its_margin(flags, margin):
    assert head_of(flags).margin == margin


@pytest.mark.parametrize(
    "flags",
    [
        "--quota insightface --sample-rate 0.1 --hard-negatives 2",
        "--sub-centres 3 --interclass-filtering-threshold 0.4 --loss curricularface --sample-rate 0.5",
        "--sample-rate 0.5 --hard-negatives 2 --loss adaface --sub-centres 2",
    ],
)
def test_what_is_not_refused_here_the_head_takes(flags):
    """The recipe's rules are the head's own."""
    head = head_of(flags)
    feat = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for _ in range(3):
        loss = head(feat, torch.arange(4))
        loss.backward()
        head.step(0.1)
        assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("mode", "asked", "operands"),
    [("bf16", "auto", "auto"), ("bf16", "bf16", "bf16"), ("fp16", "fp16", "auto"), ("fp32", "auto", "fp32")],
)
def test_operands_of_the_head(mode, asked, operands):
    """Rounded to bf16 where the hardware does not multiply such numbers: only if asked for."""
    given = config(f"--precision {asked}")
    head = build(given, mode)
    assert head.kernel.precision == flat_head(50, 8, CosFace(), precision=operands).kernel.precision
    if asked == "bf16":
        assert head.kernel.precision == "bf16"
    is_emulated = asked == "bf16" and auto_precision("cpu", torch.device("cpu")) == "fp32"
    assert (
        any("the head only rounds to it" in note for note in head_from_flags.notes(given.head, given.optim, head))
        == is_emulated
    )


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        ("--centre-place host", "--centre-place host"),
        ("--head-impl plain --precision bf16", "--head-impl plain multiplies fp32"),
        ("--head-catch-up none", "--head-catch-up none: without sampling"),
        ("--head-catch-up none --sample-rate 0.5 --head-optimizer adagrad --head-weight-decay 0", "Adagrad"),
        ("--head-catch-up none --sample-rate 0.5 --optimizer muon", "momentum rests"),
        ("--head-catch-up none --sample-rate 0.3 --optimizer sgd", "docs/fidelity.md"),
    ],
)
def test_flags_that_make_no_difference_or_cost_much_are_noted(flags, noted):
    given = config(flags)
    head = build(given)
    (note,) = head_from_flags.notes(given.head, given.optim, head)
    assert noted in note


@pytest.mark.parametrize("optimizer", ["sgd --momentum 0 --head-catch-up none", "adam", "sgd", "adagrad"])
def test_sampling_without_resting_momentum_has_no_note(optimizer):
    given = config(f"--sample-rate 0.3 --head-optimizer {optimizer}")
    head = build(given)
    assert not list(head_from_flags.notes(given.head, given.optim, head))


# ---- margin and sample rate by step


def by_step(flags: str, total_steps: int, shift: float = 0.0) -> tuple:
    return head_from_flags.margin_and_rate(config(flags).head, total_steps, shift)


@pytest.mark.parametrize(
    ("given", "total", "shift", "steps"),
    [
        ("0:0.3 60%:0.5 90%:1.0", 1000, 0.0, {0: 0.3, 600: 0.5, 900: 1.0}),
        ("0%:0.3 12.5%:1", 10, 0.0, {0: 0.3, 1: 1.0}),
        ("0:0.3 4:0.5 90%:1.0", 10, 0.0, {0: 0.3, 4: 0.5, 9: 1.0}),
        ("0:0.3 10%:0.4 30%:0.5", 2, 0.0, {0: 0.4, 1: 0.5}),  # of a short try: the last of a step counts
        # 400 of 1,000 steps, then twice the batch.
        ("0:0.3 60%:0.5 90%:1.0", 500, -200.0, {0: 0.3, 500: 0.5, 650: 1.0}),
        ("0:0.3 60%:0.5 90%:1.0", 500, 400.0, {0: 0.5, 50: 1.0}),
    ],
)
def test_percentages_are_of_the_run(given, total, shift, steps):
    assert by_step(f"--sample-rate-schedule '{given}'", total, shift) == (CosFace(64.0), Steps(steps))


@pytest.mark.parametrize(
    ("loss", "made"),
    [
        ("cosface", CosFace),
        ("arcface", ArcFace),
        ("arcface-straight-through", lambda scale, m: ArcFace(scale, m, straight_through=True)),
        ("adaface", lambda scale, m: AdaFace(scale, m)),
        ("curricularface", lambda scale, m: CurricularFace(scale, m)),
    ],
)
def test_the_margin_that_changes_is_that_of_the_loss(loss, made):
    first, then = 0.0, 0.4
    margin, rate = by_step(f"--scale 32 --loss {loss} --margin-schedule '0:{first} 50%:{then}'", 8)
    assert margin == Steps({0: made(32.0, first), 4: made(32.0, then)})
    assert rate == 1.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--sample-rate-schedule '0:0.3 60%:0.5 40%:1.0'", "40% comes after 60%; expected ascending"),
        ("--sample-rate-schedule '0:0.3 60%:1.5'", "the value at 60% is 1.5; expected more than 0 and at most 1"),
        ("--sample-rate-schedule 0:0", "the value at 0 is 0.0; expected more than 0"),
        ("--sample-rate-schedule 0.3", "'0.3'; expected STEP:VALUE or PERCENT%:VALUE"),
        ("--sample-rate-schedule '0:0.3 1.5:0.5'", "'1.5:0.5'; expected STEP:VALUE"),
        ("--sample-rate-schedule '0:0.3 100%:0.5'", "100% is the end of the run"),
        ("--sample-rate-schedule 10%:0.3", "says nothing of the first step"),
        ("--sample-rate-schedule ''", "says nothing of the first step"),
        ("--sample-rate 0.1 --sample-rate-schedule 0:0.3", "give one of them"),
        ("--sample-rate-schedule '0:1 50%:1' --hard-negatives 2", "--hard-negatives without sampling"),
        ("--margin-schedule 0:0.3 --loss softmax", "--loss softmax, which has no margin"),
        ("--margin-schedule 0:0.3 --loss combined --margins 1 0 0.2", "--loss combined, which has three numbers"),
        ("--margin-schedule '0:0.3 50%:inf'", "the value at 50% is inf"),
        ("--margin-schedule 0:2 --loss curricularface", "the value at 0 is 2.0; expected at least 0 and at most"),
        ("--margin-schedule 0:9 --scale 100", "--scale 100.0 allows logits up to 1000"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_its_flag(flags, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        config(flags)
    assert flags.split()[0] in str(error.value) or words.startswith("--")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("0:0.3 10:0.5", "step 10 is not in this run, which ends after 10"),
        ("0:0.3 8:0.5 50%:1", "50%, which is step 5 of this run, comes after 8, step 8"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(given, words):
    with pytest.raises(ValueError, match=re.escape(f"--sample-rate-schedule '{given}': {words}")):
        by_step(f"--sample-rate-schedule '{given}'", 10)
