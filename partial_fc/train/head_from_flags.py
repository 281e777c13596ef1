"""Makes PartialFC of its flags."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch

from partial_fc import head
from partial_fc.comm import World
from partial_fc.counter_rng import derive_key
from partial_fc.flags import HeadFlags, OptimFlags, flag
from partial_fc.head import (
    Compute,
    HardNegatives,
    LossOptions,
    Margin,
    PartialFC,
    RowAdagrad,
    RowAdamW,
    RowSGD,
    Rule,
    Sampling,
    Storage,
)
from partial_fc.head.kernels.choice import auto_precision
from partial_fc.head.options import check_options, check_several_labels
from partial_fc.head.rows import RowOptimizer
from partial_fc.models import encoders
from partial_fc.train.precision import Mode, Precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check(flags: HeadFlags, optim: OptimFlags, num_labels: int = 1) -> None:
    """Raises ValueError for flags of which no head can be made, before there is anything to make it for. num_labels: of
    an image, in a step."""
    margin = _margin(flags)
    if num_labels > 1 or flags.rule == "mlcd":
        check_several_labels(margin, f"{num_labels} labels an image" if num_labels > 1 else f"--rule {flags.rule}")
    if optim.accumulate > 1 and margin.state():
        raise ValueError(
            f"--accumulate {optim.accumulate} with --loss {flags.loss}: this loss keeps averages over whole "
            "batches, and micro-batches would give it others; use another loss, or a larger --batch-size"
        )
    check_options(
        margin,
        flags.sample_rate,
        interclass_filtering_threshold=flags.interclass_filtering_threshold or None,
        sub_centres=flags.sub_centres,
        hard_negatives=flags.hard_negatives > 0,
        spell=flag,
    )
    _row_optimizer(flags, optim)  # which checks itself


def build(
    flags: HeadFlags,
    num_classes: int,
    embedding_size: int,
    world: World,
    precision: Precision,
    optim: OptimFlags,
    seed: int,
    ignore_index: int | None = None,
    name: str = "",
) -> PartialFC:
    """Returns the head.

    precision: with --precision fp64, for checks, centres are stored so, too.
    ignore_index: what fills the rows of a batch with several labels; None: nothing, and no wait for the device to look
        for it.
    name: of a head that is one of several; its centres and negatives are drawn otherwise than another's.
    """
    if flags.head_weight != 1 and not name:
        raise ValueError(f"--head-weight {flags.head_weight}: there is one head; give --lr or --head-lr")
    check(flags, optim)
    device, lists = precision.device, None
    if flags.hard_negatives:
        lists = HardNegatives(num_classes, flags.hard_negatives, device=device)
    return PartialFC(
        num_classes,
        embedding_size,
        _margin(flags),
        world=world,
        seed=derive_key(seed, *name.encode()) if name else seed,
        optimizer=_row_optimizer(flags, optim),
        device=Compute(device, flags.head_impl, _operands(precision.mode, optim.precision)),
        sampling=Sampling(flags.sample_rate, flags.quota, lists, flags.head_catch_up),
        storage=_storage(flags, precision.parameter_dtype),
        loss=LossOptions(
            flags.sub_centres, flags.interclass_filtering_threshold or None, ignore_index, _rule(flags.rule)
        ),
        name=name,
    )


def notes(flags: HeadFlags, optim: OptimFlags, made: PartialFC) -> Iterator[str]:
    """What was asked for and makes no difference here, or costs more than one may know."""
    if flags.centre_place == "host" and made.store.device == torch.device("cpu"):
        yield "--centre-place host: the device that computes is the CPU, whose memory is the host's"
    if optim.precision in ("bf16", "fp16", "fp16-o2") and flags.head_impl == "plain":
        yield "--head-impl plain multiplies fp32 numbers, whatever --precision says"
    elif made.kernel.precision == "bf16" and auto_precision(made.kernel.name, made.store.device) == "fp32":
        yield "--precision bf16: the head only rounds to it here and multiplies fp32 (docs/head.md)"
    if made.margin.needs_target_cosines and made.kernel.name != "plain":
        yield f"--loss {flags.loss}: PyTorch forms its logits in fp32, not the {made.kernel.name} kernel"
    if optim.accumulate > 1 and flags.hard_negatives:
        yield "--hard-negatives with --accumulate: a class keeps the list of its last micro-batch"
    if flags.quota == "insightface" and flags.sample_rate == 1.0:
        yield "--quota insightface: without sampling every class takes part in every step"
    if flags.head_catch_up == "none":
        if flags.sample_rate == 1.0:
            yield "--head-catch-up none: without sampling every centre is active in every step and none rests"
        elif not made.optimizer.moves_without_gradient:
            yield f"--head-catch-up none: {type(made.optimizer).__name__} leaves centres alone that are not active"
        elif any(getattr(made.optimizer, name, 0) for name in ("momentum", "beta1")):
            yield "--head-catch-up none: momentum rests with the centres, which costs accuracy (docs/fidelity.md)"


def _margin(flags: HeadFlags) -> Margin:
    """Returns the margin of --loss. Raises ValueError for a file without such a class, and for what is no margin."""
    if flags.loss_file is not None:
        try:
            margin = encoders.of_file("--loss", flags.loss)(scale=flags.scale)
        except TypeError as error:  # abstract methods, or without scale
            raise ValueError(f"--loss {flags.loss}: {error}") from error
        if not isinstance(margin, Margin):
            raise ValueError(f"--loss {flags.loss} is a {type(margin).__name__}; expected a partial_fc.head.Margin")
        return margin
    if flags.loss == "combined":
        assert flags.margins is not None
        return head.CombinedMargin(flags.scale, *flags.margins)
    margins: dict[str, Callable[..., Margin]] = {
        "cosface": head.CosFace,
        "arcface": head.ArcFace,
        "arcface-straight-through": partial(head.ArcFace, straight_through=True),
        "softmax": head.Softmax,
        "adaface": head.AdaFace,
        "curricularface": head.CurricularFace,
    }
    return margins[flags.loss](flags.scale, *(flags.margins or ())[1:2])


def _rule(name: str) -> Rule:
    rules = (head.MeanSoftmax(), head.OwnOut(), head.SoftTarget(), head.MLC(), head.MLCD())
    return dict(zip(("mean-softmax", "own-out", "soft-target", "mlc", "mlcd"), rules, strict=True))[name]


def _row_optimizer(flags: HeadFlags, optim: OptimFlags) -> RowOptimizer:
    decay = optim.weight_decay if flags.head_weight_decay is None else flags.head_weight_decay
    match flags.moved_by(optim):
        case "sgd" | "nesterov" as name:
            return RowSGD(optim.momentum, decay, nesterov=name == "nesterov")
        case "adamw":
            return RowAdamW(weight_decay=decay)
    return RowAdagrad(weight_decay=decay)


def _storage(flags: HeadFlags, dtype: torch.dtype) -> Storage:
    """dtype: of the backbone's parameters."""
    if dtype == torch.float64:
        return Storage(dtype, None, flags.centre_place)
    return Storage(_DTYPES[flags.centre_dtype], _DTYPES[flags.state_dtype], flags.centre_place)


def _operands(mode: Mode, asked: str) -> Literal["auto", "fp32", "bf16"]:
    """Returns the type of the head's operands: bf16 also for fp16, where its kernel multiplies such numbers."""
    if mode in ("fp32", "fp64"):
        return "fp32"
    return "bf16" if asked == "bf16" else "auto"
