"""`RowMath` in two C++ functions (native/rows.h), one before the kernel's first pass and one after it. Both read the
targets' centres from the table instead of keeping a copy."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partial_fc.head.kernels import by_label
from partial_fc.head.native.library import DTYPES, call
from partial_fc.head.selection.active_rows import ActiveRows
from partial_fc.head.shard import Shard
from partial_fc.head.softmax import RowMath, Targets


@dataclass(frozen=True)
class TableTargets(Targets):
    """Targets whose centres are read from the table."""

    job: dict[str, Any]  # what both calls have in common


class CpuRowMath(RowMath):
    """`RowMath` in C++, float32."""

    def __init__(self, compiled: ctypes.CDLL):
        self.compiled = compiled

    def find_targets(
        self, feat_GD: Tensor, label_G: Tensor, shard: Shard, sub_centres: int, active: ActiveRows, dtype: torch.dtype
    ) -> Targets:
        if feat_GD.dtype not in DTYPES or feat_GD.stride(1) != 1:
            feat_GD = feat_GD.to(dtype).contiguous()
        G, D = feat_GD.shape
        sizes = ((G, D), (G, 1), label_G.shape)
        unit_GD, norm_G1, cos_G = (torch.empty(size, dtype=torch.float32) for size in sizes)
        elsewhere_G, position_G = torch.empty_like(label_G, dtype=torch.bool), torch.empty_like(label_G)
        job = {
            "G": G,
            "D": D,
            "S": len(active.table) if active.row_S is None else len(active.row_S),
            "T": label_G[:1].numel(),
            "label": by_label(label_G),
            "start": shard.start,
            "num_local": len(shard),
            "active": active.rows,
            "row": active.row_S,
            "table": active.table,
            "table_dtype": DTYPES[active.table.dtype],
            "sub_centres": sub_centres,
            "threads": torch.get_num_threads(),
            "unit": unit_GD,
            "norm": norm_G1,
            "position": position_G,
        }
        feat = {
            "feat": feat_GD,
            "feat_dtype": DTYPES[feat_GD.dtype],
            "feat_stride": feat_GD.stride(0) * feat_GD.itemsize,
        }
        call(self.compiled, "head_row_targets", {**job, **feat, "cos": cos_G, "elsewhere": elsewhere_G})
        return TableTargets(unit_GD, norm_G1, elsewhere_G, cos_G, None, position_G, job)

    def feature_gradient(
        self, weighted_sum_GD: Tensor, weight_G: Tensor, target_grad_G: Tensor, targets: Targets
    ) -> Tensor:
        assert isinstance(targets, TableTargets)
        numbers = {"weight": weight_G, "target_grad": by_label(target_grad_G)}
        call(self.compiled, "head_row_gradients", {**targets.job, "sum": weighted_sum_GD, **numbers})
        return weighted_sum_GD
