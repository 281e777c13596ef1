"""Flags of recipe `face` that shape the head: what they make."""

import shlex

import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC
from partial_fc.head.kernels.choice import auto_precision
from partial_fc.head.margin import CombinedMargin
from partial_fc.head.margin_adaptive import AdaFace
from partial_fc.head.margin_curricular import CurricularFace
from partial_fc.train import head_from_flags
from partial_fc.train.precision import Mode, Precision
from recipes.face.main import Config, parse
from tests.flat import flat_head, learn


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
    ("code", "says"),
    [
        (None, "cannot be run: .*No such file"),
        ("import nothing_of_that_name", r"own\.py cannot be run: .*nothing_of_that_name"),
        ("Another = 3", r"own\.py has no Mine; it has none"),
        ("def Mine(scale): return scale", "is a float; expected a partial_fc.head.Margin"),
        ("from partial_fc.head import Margin\nclass Mine(Margin): bound = 1", "abstract class Mine .*target"),
        ("Mine = int", "scale"),
    ],
)
def test_a_file_without_a_margin_is_named(tmp_path, code, says):
    if code is not None:
        (tmp_path / "own.py").write_text(code)
    with pytest.raises(ValueError, match=rf"--loss \S+own\.py:Mine.*{says}"):
        config(f"--loss {tmp_path}/own.py:Mine")


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
        assert torch.isfinite(learn(head, feat, torch.arange(4)))


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
    notes = head_from_flags.notes(given.head, given.optim, head)
    assert any("the head only rounds to it" in note for note in notes) == is_emulated


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


@pytest.mark.parametrize("optimizer", ["sgd --momentum 0 --head-catch-up none", "adamw", "sgd", "adagrad"])
def test_sampling_without_resting_momentum_has_no_note(optimizer):
    given = config(f"--sample-rate 0.3 --head-optimizer {optimizer}")
    head = build(given)
    assert not list(head_from_flags.notes(given.head, given.optim, head))
