"""The options of PartialFC that go together, and checks of their values and combinations."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch

from partial_fc.head.kernels import AutoPrecision, Impl
from partial_fc.head.margin import Margin
from partial_fc.head.rule import Rule
from partial_fc.head.selection.hard_negatives import HardNegatives
from partial_fc.head.selection.sampling import Quota

# The denominators of the ranks are added as sums of exp(logit) in float64, whose range ends at exp(709): with logits
# bounded by this, no maximum has to be agreed upon first, and no row can under- or overflow.
_LARGEST_LOGIT = 600.0


@dataclass(frozen=True)
class Sampling:
    """Which classes take part in a step, and what becomes of the others.

    rate: the share of all classes that are negatives, in (0, 1].
    quota: "negatives": the batch's classes come on top of the sample; "insightface": they are part of it.
    hard_negatives: HardNegatives(num_classes, k=5): centres near the batch's classes take part, too.
    catch_up: "exact": before a row that was not sampled takes part again it is brought up to what a dense optimizer has
        made of it, as in arcface_torch; "none": it rests, as in InsightFace's trainer of 2020, which costs accuracy if
        it has momentum (docs/fidelity.md).
    """

    rate: float = 1.0
    quota: Quota = "negatives"
    hard_negatives: HardNegatives | None = None
    catch_up: Literal["exact", "none"] = "exact"


@dataclass(frozen=True)
class Compute:
    """What computes a head.

    device: it also holds the centres, unless the storage says otherwise.
    impl: the kernel: plain, cpu or triton (kernels/); auto: the fastest on this device.
    precision: of the operands of matrix products, "fp32" or "bf16"; "auto": bf16 where the hardware multiplies it.
        Sums are float32 or wider.
    """

    device: torch.device | str = "cpu"
    impl: Impl = "auto"
    precision: AutoPrecision = "fp32"


@dataclass(frozen=True)
class LossOptions:
    """What the loss is of, besides the margin.

    sub_centres: centres of a class; its logit is that of the nearest.
    interclass_filtering_threshold: a negative with a larger cosine is left out of the row's softmax; None: none is.
    ignore_index: the label that stands for none: rows without labels take no part; None: every label is a class.
    rule: the loss of rows with several labels (rule.py); None: MeanSoftmax().
    backbone_gradients: how the caller combines the ranks' gradients of the backbone: "sum" (GradientSync), or "average"
        (DistributedDataParallel, horovod.DistributedOptimizer): features then get W times their gradient. None: "sum".
    """

    sub_centres: int = 1
    interclass_filtering_threshold: float | None = None
    ignore_index: int | None = -100
    rule: Rule | None = None
    backbone_gradients: Literal["sum", "average"] | None = None


def one_sampling(sample_rate: float, sampling: Sampling | None) -> Sampling:
    """Returns the sampling, of which a rate is the short form. Raises ValueError if both are given."""
    if sampling is None:
        return Sampling(sample_rate)
    if sample_rate != 1.0:
        raise ValueError(f"sample_rate is {sample_rate} and sampling {sampling}: give Sampling(rate, ...) alone")
    return sampling


def check_options(
    margin: Margin,
    sample_rate: float,
    *,
    interclass_filtering_threshold: float | None,
    sub_centres: int,
    hard_negatives: bool,
    spell: Callable[[str], str] = str,
) -> None:
    """Raises ValueError for options of PartialFC that do not go together. spell: what the user calls an
    option."""
    if sub_centres < 1:
        raise ValueError(f"{spell('sub_centres')} is {sub_centres}; expected at least 1")
    above = interclass_filtering_threshold
    if above is not None and not (isinstance(above, Real) and -1.0 <= above <= 1.0):
        raise ValueError(f"{spell('interclass_filtering_threshold')} is {above!r}; expected a cosine, -1 to 1, or none")
    if margin.scale * margin.bound > _LARGEST_LOGIT:
        raise ValueError(
            f"{spell('scale')} {margin.scale} allows logits up to {margin.scale * margin.bound:.0f}; "
            f"expected at most {_LARGEST_LOGIT:.0f}: choose a smaller scale"
        )
    if hard_negatives and sample_rate == 1.0:
        raise ValueError(
            f"{spell('hard_negatives')} without sampling: every class is active in every step; leave it out, or give a "
            f"{spell('sample_rate')} below 1"
        )


def check_several_labels(margin: Margin, what: str) -> None:
    """Raises ValueError for a margin that has no meaning where a row has several labels, or with `what`."""
    if margin.needs_target_cosines:
        raise ValueError(
            f"{what} with {type(margin).__name__}, whose hard negatives are told by one target; leave one of the two "
            "out"
        )
