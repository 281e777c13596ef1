"""Checks what a caller hands to a head and converts it to rows of features with one label each."""

import operator
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partial_fc.comm import World, from_process_group
from partial_fc.head.gather import FEATURE_DTYPES
from partial_fc.head.margin import ArcFace, CosFace, Margin, Softmax
from partial_fc.head.margin_adaptive import AdaFace
from partial_fc.head.margin_curricular import CurricularFace
from partial_fc.head.options import LossOptions, Sampling
from partial_fc.head.rows import RowOptimizer, Storage
from partial_fc.head.rule import Rule
from partial_fc.head.selection.batches import class_numbers
from partial_fc.head.selection.hard_negatives import HardNegatives

_MARGINS = {kind.__name__.lower(): kind for kind in (ArcFace, CosFace, Softmax, AdaFace, CurricularFace)}
_KINDS = {
    "optimizer": (RowOptimizer, "one of rows, as RowSGD(momentum=0.9) or RowAdamW()"),
    "sampling": (Sampling, "Sampling(0.1, quota='insightface'), for one"),
    "storage": (Storage, "Storage(torch.bfloat16), for one"),
    "loss": (LossOptions, "LossOptions(sub_centres=3), for one"),
    "rule": (Rule, "MeanSoftmax(), OwnOut(), SoftTarget(), MLC() or MLCD()"),
    "hard_negatives": (HardNegatives, "HardNegatives(num_classes, k=5), for one"),
}


def margin_of(margin: Margin | str) -> Margin:
    """Returns the margin; a name stands for that margin with its defaults. Raises ValueError for another name."""
    if isinstance(margin, Margin):
        return margin
    if not isinstance(margin, str) or margin not in _MARGINS:
        names = ", ".join(_MARGINS)
        raise ValueError(f"margin is {margin!r}; expected a Margin, as CosFace(scale=64.0), or one of {names}")
    return _MARGINS[margin]()


def check_kinds(**given: Any) -> None:
    """Raises TypeError for an argument of another kind than PartialFC takes; None stands for the default."""
    for name, value in given.items():
        kind, example = _KINDS[name]
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}; expected {example}")


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


def num_processes() -> int:
    """Returns how many processes torch.distributed has; 1 where it is not initialized."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def world_of(world: Any) -> World | None:
    """Returns the world; a process group of torch.distributed is wrapped into one. Warns if none is given where
    torch.distributed has several processes. Raises TypeError for anything else."""
    if world is None and (size := num_processes()) > 1:
        warnings.warn(
            f"PartialFC without world= in one of {size} processes: each trains a head of its own with all classes; "
            "world=torch.distributed.new_group() shards them (world=partial_fc.comm.SingleWorld(): no warning)",
            stacklevel=4,
        )
    if world is None or isinstance(world, World):
        return world
    if torch.distributed.is_available() and isinstance(world, torch.distributed.ProcessGroup):
        return from_process_group(world)
    raise TypeError(f"world is {type(world).__name__}; expected comm.init(), a ProcessGroup, or None for one process")


def device_of(device: torch.device | str) -> torch.device:
    """Returns the device. Raises ValueError for what is none, and for a GPU where torch finds none."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}; expected a torch.device, or 'cpu', 'cuda', 'cuda:1'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}; torch finds no GPU here (see `nvidia-smi`, and torch's CUDA build)")
    return found


class Rows(NamedTuple):
    """A rank's rows that take part."""

    feat_BD: Tensor
    label_B: Tensor  # (B,), or (B, T) with several labels
    weight_BT: Tensor | None  # of several labels, float64: they add up to 1 in each row; 0 where a row has fewer
    kept_B: Tensor | None  # bool: which of the given rows these are; None: all
    row_weight_B: Tensor | None = None  # float64, of each row's loss; None: 1


def rows_of(feat: Tensor, label: Tensor, embedding_size: int, ignore_index: int | None, world: World) -> Rows:
    """Returns features (..., D) and labels (...) as rows, without those whose label is ignore_index. Raises TypeError
    for what is no tensor, ValueError for other shapes and dtypes."""
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
    feat_BD, label_B, kept_B = feat.flatten(0, -2), class_numbers(label).flatten(), None
    if ignore_index is not None and bool((ignored_B := label_B == ignore_index).any()):
        feat_BD, label_B, kept_B = feat_BD[~ignored_B], label_B[~ignored_B], ~ignored_B
    return Rows(feat_BD, label_B, None, kept_B)


def rows_with_labels(
    feat: Tensor,
    label: Tensor,
    weight: Tensor | None,
    rule: Rule,
    embedding_size: int,
    ignore_index: int | None,
    where: World,
) -> Rows:
    """Returns features (..., D) as rows with their labels, (...) or (..., T), of which each is named once; where a row
    has fewer than T, one of them stands again, with weight 0. Raises TypeError and ValueError as `rows_of`, and
    ValueError for weights that are negative or not finite."""
    several = isinstance(label, Tensor) and isinstance(feat, Tensor) and label.dim() == feat.dim() > 1
    if not several:
        if weight is not None:
            raise ValueError(
                f"{where}: weights with one label a row; expected labels (B, K) with weights (B, K), or none; "
                "weights of rows are row_weight_B"
            )
        return rows_of(feat, label, embedding_size, ignore_index, where)
    if not label.shape[-1]:
        raise ValueError(f"{where}: labels {tuple(label.shape)}; expected at least one label a row")
    feat_BD, kept_B = rows_of(feat, label[..., 0], embedding_size, None, where).feat_BD, None
    label_BT = class_numbers(label).flatten(0, -2)
    real_BT = torch.ones_like(label_BT, dtype=torch.bool) if ignore_index is None else label_BT != ignore_index
    weight_BT = real_BT.double() if weight is None else _checked_weights(weight, label, real_BT, rule, where)
    real_BT = weight_BT > 0
    if not bool((some_B := real_BT.any(dim=1)).all()):
        feat_BD, label_BT, weight_BT, real_BT = (x[some_B] for x in (feat_BD, label_BT, weight_BT, real_BT))
        kept_B = some_B
    label_BT = label_BT.where(real_BT, label_BT.gather(1, real_BT.int().argmax(dim=1, keepdim=True)))
    if label_BT.shape[1] == 1:
        return Rows(feat_BD, label_BT.squeeze(1), None, kept_B)
    # The weights of equal labels go to the first of them.
    same_BTT = label_BT[:, :, None] == label_BT[:, None]
    weight_BT = (same_BTT * weight_BT[:, None]).sum(dim=2).masked_fill_(same_BTT.tril(-1).any(dim=2), 0.0)
    return Rows(feat_BD, label_BT, weight_BT / weight_BT.sum(dim=1, keepdim=True), kept_B)


def _checked_weights(weight: Tensor, label: Tensor, real_BT: Tensor, rule: Rule, where: World) -> Tensor:
    if not rule.has_weights:
        raise ValueError(
            f"{where}: {type(rule).__name__} gives weights no meaning; leave them out, or take another rule"
        )
    if weight.shape != label.shape or not weight.is_floating_point() or weight.device != label.device:
        raise ValueError(
            f"{where}: weights are {weight.dtype}, {tuple(weight.shape)}, on {weight.device}; expected floating ones "
            f"of the labels' shape {tuple(label.shape)}, on {label.device}"
        )
    return _finite(weight.detach().double().flatten(0, -2).masked_fill(~real_BT, 0.0), where)


def _finite(weight: Tensor, where: World) -> Tensor:
    """Returns weights of rows (B,), or of their labels (B, T). Raises ValueError for one that is negative or not
    finite."""
    bad = (weight < 0) | ~weight.isfinite()
    if bool(bad.any()):
        row, *place = bad.nonzero()[0].tolist()
        label = f" of label {place[0]}" if place else ""
        raise ValueError(
            f"{where}: weight {weight[bad][0].item()}{label} of row {row} ({int(bad.sum())} such); expected finite "
            "ones, 0 or more"
        )
    return weight


def row_weights(weight: Any, rows: Rows, given: torch.Size, where: World) -> Tensor | None:
    """Returns the weights of the rows, on their device. given: the shape of the features as they came. Weights on the
    CPU are checked there, so that no device is waited for. Raises TypeError and ValueError as `rows_of`, and
    ValueError for weights that are negative or not finite."""
    if weight is None:
        return None
    if not isinstance(weight, Tensor):
        raise TypeError(f"{where}: row weights are {type(weight).__name__}; expected torch.tensor(weights)")
    if weight.shape != given[:-1] or not weight.is_floating_point():
        raise ValueError(
            f"{where}: row weights are {weight.dtype}, {tuple(weight.shape)}; expected floating ones, "
            f"{tuple(given[:-1])}, one for each feature"
        )
    weight_B = _finite(weight.detach().double().flatten(), where).to(rows.feat_BD.device, non_blocking=True)
    return weight_B if rows.kept_B is None else weight_B[rows.kept_B]
