"""Flags of recipe `face` that shape the head: what they make, and which pairs are refused before anything is read."""

import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.errors import UsageError
from partial_fc.head import CosFace, PartialFC
from partial_fc.head.kernels import auto_precision
from partial_fc.head.margin import CombinedMargin, SphereFace
from partial_fc.head.margin_adaptive import AdaFace, CurricularFace
from partial_fc.train.precision import Precision
from recipes.face import Config, parse


def config(flags: str) -> Config:
    return parse(["--dataset", "synthetic", "--num-classes", "50", *flags.split()])[0]


def head_of(flags: str) -> PartialFC:
    given = config(f"--head-impl plain --precision fp32 {flags}")
    return given.head.build(50, 8, SingleWorld(), Precision("fp32", torch.device("cpu")), given.optim, seed=0)


@pytest.mark.parametrize(
    ("flags", "margin"),
    [
        ("", CombinedMargin(64.0, m3=0.4)),
        ("--loss arcface --scale 32", CombinedMargin(32.0, m2=0.5)),
        ("--loss softmax", CombinedMargin(64.0)),
        ("--loss combined --margins 1.2 0.1 0.2", CombinedMargin(64.0, 1.2, 0.1, 0.2)),
        ("--loss sphereface --scale 30", SphereFace(30.0)),
        ("--loss adaface", AdaFace(64.0, m=0.4, h=0.333)),
        ("--loss curricularface", CurricularFace(64.0, m=0.5)),
    ],
)
def test_every_loss_has_its_margin(flags, margin):
    assert head_of(flags).margin == margin


def test_hard_negatives_are_off_unless_asked_for():
    assert head_of("").hard_negatives is None
    lists = head_of("--hard-negatives 3 --hard-negatives-every 7 --sample-rate 0.5").hard_negatives
    assert (lists.k, lists.every) == (3, 7)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--label-smoothing 0.1 --interclass-filtering-threshold 0.4", "--label-smoothing with --interclass"),
        ("--label-smoothing 0.1 --sub-centres 2", "--label-smoothing with --sub-centres"),
        ("--label-smoothing 0.1 --loss curricularface", "--label-smoothing with CurricularFace"),
        (
            "--label-smoothing 0.1 --sampling-correction --sample-rate 0.5",
            "--label-smoothing with --sampling-correction",
        ),
        ("--sampling-correction", "--sampling-correction without sampling"),
        (
            "--sampling-correction --sample-rate 0.5 --quota insightface",
            "--sampling-correction with --quota insightface",
        ),
        ("--quota theirs --sample-rate 0.5", "--quota"),
        ("--hard-negatives 4", "--hard-negatives without sampling"),
        ("--hard-negatives 4 --hard-negatives-every 0 --sample-rate 0.5", "--hard-negatives-every is 0"),
        ("--sub-centres 0", "--sub-centres is 0"),
        ("--label-smoothing 1", "--label-smoothing is 1.0"),
        ("--interclass-filtering-threshold -0.1", "--interclass-filtering-threshold is -0.1"),
        ("--hard-negatives-every 5 --sample-rate 0.5", "--hard-negatives-every without --hard-negatives"),
        ("--centre-place disk", "--centre-place disk and --centre-path DIR go together"),
        ("--centre-path rows", "--centre-place disk and --centre-path DIR go together"),
        ("--centre-place disk --centre-path setup.cfg", "--centre-path setup.cfg is a file"),
        ("--centre-state-dtype bf16 --head-optimizer adagrad", "with --head-optimizer adagrad: its state is one"),
        ("--centre-dtype fp16 --head-optimizer adamw", "AdamW with its state in fp16"),
        ("--centre-state-dtype fp16 --optimizer adamw", "AdamW with its state in fp16"),
        ("--head-optimizer nesterov --momentum 0", "nesterov with momentum 0"),
        ("--head-lr 0.1 --lr 0", "--head-lr 0.1 with --lr 0"),
        ("--head-lr -1", "--head-lr is -1.0"),
        ("--head-weight-decay -1", "--head-weight-decay is -1.0"),
        ("--precision fp64 --centre-dtype bf16", "--precision fp64 stores the centres so"),
        ("--precision fp64 --head-impl cpu", "--head-impl cpu computes in fp32"),
        ("--head-impl triton --device cpu", "--head-impl triton with --device cpu"),
        ("--head-impl cpu --device cuda", "--head-impl cpu with --device cuda"),
        ("--head-centres a --resume b", "--head-centres with --resume b"),
    ],
)
def test_refused_at_the_start_by_the_names_of_the_flags(flags, message):
    with pytest.raises(UsageError) as refused:
        config(flags)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--label-smoothing 0.1 --sample-rate 0.5 --hard-negatives 2",
        "--quota insightface --sample-rate 0.1 --label-smoothing 0.1",
        "--sub-centres 3 --interclass-filtering-threshold 0.4 --loss curricularface --sample-rate 0.5",
        "--sampling-correction --sample-rate 0.5 --hard-negatives 2 --loss adaface --sub-centres 2",
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
    head = given.head.build(50, 8, SingleWorld(), Precision(mode, torch.device("cpu")), given.optim, seed=0)
    assert head.kernel.precision == PartialFC(50, 8, CosFace(), precision=operands).kernel.precision
    if asked == "bf16":
        assert head.kernel.precision == "bf16"
    is_emulated = asked == "bf16" and auto_precision("cpu", torch.device("cpu")) == "fp32"
    assert any("the head only rounds to it" in note for note in given.head.notes(given.optim, head)) == is_emulated
