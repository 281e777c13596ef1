"""The last layer of recipe `face`: from flags to PartialFC."""

import torch

from partial_fc.comm import World
from partial_fc.head import (
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    HardNegatives,
    Margin,
    PartialFC,
    Softmax,
    SphereFace,
    Storage,
)
from partial_fc.head.rows import RowAdagrad, RowAdam, RowAdamW, RowOptimizer, RowSGD
from partial_fc.machine import has_bf16
from partial_fc.train.precision import Precision
from recipes.face_checks import row_optimizer_name
from recipes.face_config import Config

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_head(config: Config, num_classes: int, world: World, precision: Precision) -> PartialFC:
    """With --precision fp64, for checks, centres are stored so, too."""
    device, dtype = precision.device, precision.parameter_dtype
    # The head has no fp16 products: with an fp16 backbone it takes bf16 where the hardware has that.
    narrow = precision.mode == "bf16" or (precision.mode.startswith("fp16") and has_bf16(device))
    hard_negatives = None
    if config.hard_negatives:
        hard_negatives = HardNegatives(num_classes, config.hard_negatives, config.hard_negatives_every, device=device)
    return PartialFC(
        num_classes,
        config.embedding_size,
        _margin(config),
        config.sample_rate,
        world,
        config.seed,
        _row_optimizer(config),
        device,
        dtype,
        impl=config.head_impl,
        precision="bf16" if narrow else "fp32",
        storage=_storage(config, dtype),
        catch_up=config.head_catch_up,
        interclass_filtering_threshold=config.interclass_filtering_threshold or None,
        sub_centres=config.sub_centres,
        label_smoothing=config.label_smoothing,
        sampling_correction=config.sampling_correction,
        hard_negatives=hard_negatives,
    )


def head_lr_ratio(config: Config) -> float:
    """What the schedule's learning rate is multiplied by for the centres."""
    return 1.0 if config.head_lr is None else config.head_lr / config.lr


def _margin(config: Config) -> Margin:
    if config.margins is not None:
        return CombinedMargin(config.scale, *config.margins)
    match config.loss:
        case "cosface":
            return CosFace(config.scale)
        case "softmax":
            return Softmax(config.scale)
        case "sphereface":
            return SphereFace(config.scale)
        case "adaface":
            return AdaFace(config.scale)
        case "curricularface":
            return CurricularFace(config.scale)
    return ArcFace(config.scale, straight_through=config.loss == "arcface-straight-through")


def _row_optimizer(config: Config) -> RowOptimizer:
    name = row_optimizer_name(config)
    decay = config.weight_decay if config.head_weight_decay is None else config.head_weight_decay
    match name:
        case "sgd" | "nesterov":
            return RowSGD(config.momentum, decay, nesterov=name == "nesterov")
        case "adamw":
            return RowAdamW(weight_decay=decay)
        case "adam":
            return RowAdam(weight_decay=decay)
    return RowAdagrad(weight_decay=decay)


def _storage(config: Config, dtype: torch.dtype) -> Storage:
    if dtype == torch.float64:
        return Storage(dtype, None, config.centre_place, config.centre_path)
    centre = _DTYPES[config.centre_dtype]
    state = centre if config.centre_state_dtype == "same" else _DTYPES[config.centre_state_dtype]
    return Storage(centre, state, config.centre_place, config.centre_path)
