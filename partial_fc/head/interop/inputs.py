"""Checks what a caller hands to a head and converts it to rows of features with one label each."""

import operator
import warnings
from typing import Any

import torch
from torch import Tensor

from partial_fc.comm import World, from_process_group
from partial_fc.head.batches import class_numbers
from partial_fc.head.gather import FEATURE_DTYPES
from partial_fc.head.margin import ArcFace, CosFace, Margin, Softmax
from partial_fc.head.rows import RowOptimizer, RowSGD


def margin_of(margin: Margin | str) -> Margin:
    """Returns the margin; a name stands for that margin with its defaults. Raises ValueError for another name."""
    if isinstance(margin, Margin):
        return margin
    named = {"arcface": ArcFace, "cosface": CosFace, "softmax": Softmax}
    if margin not in named:
        names = ", ".join(named)
        raise ValueError(f"margin is {margin!r}; expected a Margin, as CosFace(scale=64.0), or one of {names}")
    return named[margin]()


def integer_of(name: str, value: Any, least: int | None = 1) -> int:
    """Returns an argument as an int; numpy's and torch's integers are welcome. Raises TypeError for what is no integer,
    ValueError below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected an integer") from None
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}; expected at least {least}")
    return number


def dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Returns what the head computes in. Raises ValueError for what it only stores."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"dtype is {dtype}; the head computes in torch.float32, or torch.float64 for checks; "
            "storage=Storage(torch.bfloat16) stores the centres in less"
        )
    return dtype


def optimizer_of(optimizer: RowOptimizer | None) -> RowOptimizer:
    """Returns the optimizer; None stands for RowSGD(). Raises TypeError for others, as those of torch.optim."""
    if optimizer is not None and not isinstance(optimizer, RowOptimizer):
        raise TypeError(f"optimizer is {optimizer!r}; expected one of rows, as RowSGD(momentum=0.9) or RowAdamW()")
    return optimizer or RowSGD()


def world_of(world: Any) -> World | None:
    """Returns the world; a process group of torch.distributed is wrapped into one. Warns if none is given where
    torch.distributed has several processes. Raises TypeError for anything else."""
    if world is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        if (size := torch.distributed.get_world_size()) > 1:
            warnings.warn(
                f"PartialFC without world= in one of {size} processes: each trains a head of its own with all classes; "
                "world=torch.distributed.new_group() shards them (world=partial_fc.comm.SingleWorld(): no warning)",
                stacklevel=4,
            )
        return None
    if world is None or isinstance(world, World):
        return world
    if torch.distributed.is_available() and isinstance(world, torch.distributed.ProcessGroup):
        return from_process_group(world)
    raise TypeError(f"world is {type(world).__name__}; expected comm.init(), a ProcessGroup, or None for one process")


def device_of(device: torch.device | str) -> torch.device:
    """Returns the device. Raises ValueError for a GPU where torch finds none."""
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}; torch finds no GPU here (see `nvidia-smi`, and torch's CUDA build)")
    return found


def rows_of(
    feat: Tensor, label: Tensor, embedding_size: int, ignore_index: int | None, world: World
) -> tuple[Tensor, Tensor]:
    """Flattens features (..., D) and labels (...) to (feat_BD, label_B), without the rows whose label is ignore_index.
    Raises TypeError for what is no tensor, ValueError for other shapes and dtypes."""
    if not isinstance(label, Tensor) or not isinstance(feat, Tensor):
        wrong = label if isinstance(feat, Tensor) else feat
        raise TypeError(f"{world}: got {type(wrong).__name__}; expected tensors: features, and torch.tensor(labels)")
    if feat.dim() < 2 or feat.shape[-1] != embedding_size or label.shape != feat.shape[:-1]:
        raise ValueError(
            f"{world}: features {tuple(feat.shape)} with labels {tuple(label.shape)}; expected "
            f"(..., {embedding_size}) and (...), as (B, {embedding_size}) and (B,)"
        )
    if feat.dtype not in FEATURE_DTYPES:
        raise ValueError(f"{world}: features are {feat.dtype}; expected one of {FEATURE_DTYPES}")
    feat_BD, label_B = feat.flatten(0, -2), class_numbers(label).flatten()
    if ignore_index is not None and bool((ignored_B := label_B == ignore_index).any()):
        feat_BD, label_B = feat_BD[~ignored_B], label_B[~ignored_B]
    return feat_BD, label_B
