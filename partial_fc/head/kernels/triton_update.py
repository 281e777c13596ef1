"""The row update on the GPU, after the gradient's product: whole rows in registers, from the sums over the features to
centres and state as they are stored, each read once and written once (triton_bytes.py counts).

A product's tile does not hold whole rows, and the projection across a centre, the mean squares of row-wise optimizers
and 1 / length need them. So the product leaves its sums to this kernel, 4 bytes a number, in a chunk that stays in the
L2 cache. The optimizers are those of rows/optimizers.py, the random bits those of counter_rng.rounding_noise.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partial_fc.head.kernels import LogitGrad, Logits
from partial_fc.head.kernels import triton_kernels as gpu
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD

if TYPE_CHECKING:
    from partial_fc.head.rows import RowTable


@triton.jit(
    do_not_specialize=[
        "K", "begin", "first_row", "touched_step", "centre_key", "first_key", "second_key", "lr", "keep",
    ]
)  # fmt: skip
def finish_rows(
    sum_ptr, unit_ptr, order_ptr, own_ptr, target_grad_ptr, centre_ptr, row_ptr, stride, K, begin,
    first_ptr, second_ptr, scalar_ptr, steps_ptr, touched_ptr,
    first_row, touched_step, centre_key, first_key, second_key, lr, keep, decay, beta1, weight1, beta2, weight2, eps,
    LABELS: tl.constexpr, OPTIMIZER: tl.constexpr, NESTEROV: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """sum (K, D): over features of weight * feature, SHRUNK, where weight is already over the centre's length; it
    becomes the gradient, or stays and the rows move. Targets own[k] to own[k + 1] of `order` are those whose centre k
    is, LABELS of each feature; each adds target_grad * feature / length."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    there = place < K
    mask = there[:, None] & (d < D)[None, :]
    if row_ptr is None:
        row = begin + place
    else:
        row = tl.load(row_ptr + place, mask=there, other=0)
    at = row[:, None] * D + d[None, :]
    centre_at = row[:, None] * stride + d[None, :]
    centre = tl.load(centre_ptr + centre_at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(sum_ptr + place[:, None] * D + d[None, :], mask=mask, other=0.0) * (1.0 / gpu.SHRUNK)

    square = tl.sum(centre * centre, axis=1)
    long = square >= gpu.SMALLEST
    inverse = tl.where(long, tl.div_rn(1.0, tl.sqrt_rn(tl.where(long, square, 1.0))), 0.0)
    inverse = tl.where(square < float("inf"), inverse, float("nan"))  # a length beyond fp32: 0 would hide it
    low = tl.load(own_ptr + place, mask=there, other=0)
    high = tl.load(own_ptr + place + 1, mask=there, other=0)
    most = tl.max(high - low, axis=0)
    for i in range(0, most):
        mine = low + i < high
        target = tl.load(order_ptr + low + i, mask=mine, other=0)
        share = tl.load(target_grad_ptr + target, mask=mine, other=0.0) * inverse
        feature = tl.load(
            unit_ptr + (target // LABELS)[:, None] * D + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0
        )
        grad += share[:, None] * feature
    along = tl.sum(grad * centre, axis=1) * inverse * inverse
    grad -= centre * along[:, None]

    if OPTIMIZER == gpu.NONE:
        tl.store(sum_ptr + place[:, None] * D + d[None, :], grad, mask=mask)
    else:
        number = first_row + row
        tl.store(touched_ptr + row, tl.full((BLOCK_K,), touched_step, tl.int32), mask=there)
        if (OPTIMIZER == gpu.SGD) | (OPTIMIZER == gpu.ROW_ADAGRAD):
            grad += centre * decay
        if OPTIMIZER != gpu.ROW_ADAGRAD:
            first = tl.load(first_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if OPTIMIZER == gpu.SGD:
            first = first * beta1 + grad
            step = first
            if NESTEROV:
                step = grad + first * beta1
            moved = centre - step * lr
        elif OPTIMIZER == gpu.ROW_ADAGRAD:
            square_sum = tl.load(scalar_ptr + row, mask=there, other=0.0) + tl.sum(grad * grad, axis=1) / D
            tl.store(scalar_ptr + row, square_sum, mask=there)
            scale = tl.sqrt_rn(square_sum) + eps
            # A row whose gradients were all 0 stays, also with eps 0.
            moved = centre - tl.div_rn(grad * lr, tl.where(scale == 0, 1.0, scale)[:, None])
        else:
            num = tl.load(steps_ptr + row, mask=there, other=0.0) + 1.0
            tl.store(steps_ptr + row, num, mask=there)
            correct1 = gpu.correction(num, LOG_BETA1)
            correct2 = gpu.correction(num, LOG_BETA2)
            first += (grad - first) * weight1
            second = tl.load(second_ptr + at, mask=mask, other=0.0).to(tl.float32)
            second = second * beta2 + grad * grad * weight2
            gpu.write(second_ptr, at, mask, second, number, d, second_key)
            scale = (tl.sqrt_rn(tl.div_rn(second, correct2[:, None])) + eps) * correct1[:, None]
            moved = centre * keep - tl.div_rn(first * lr, tl.where(mask, scale, 1.0))
        if OPTIMIZER != gpu.ROW_ADAGRAD:
            gpu.write(first_ptr, at, mask, first, number, d, first_key)
        gpu.write(centre_ptr, centre_at, mask, moved, number, d, centre_key)


def gradient_only() -> dict[str, Any]:
    """The optimizer's arguments of `finish_rows`, where the gradient is asked for."""
    tables = dict.fromkeys(("first_ptr", "second_ptr", "scalar_ptr", "steps_ptr", "touched_ptr"))
    integers = dict.fromkeys(("first_row", "touched_step", "centre_key", "first_key", "second_key"), 0)
    numbers = dict.fromkeys(("lr", "keep", "decay", "beta1", "weight1", "beta2", "weight2", "eps"), 0.0)
    constants = {"OPTIMIZER": gpu.NONE.value, "NESTEROV": False, "LOG_BETA1": 0.0, "LOG_BETA2": 0.0}
    return {**tables, **integers, **numbers, **constants}


def optimizer_step(store: "RowTable", num_rows: int, lr: float, step: int) -> dict[str, Any]:
    """The optimizer's arguments of `finish_rows`; the store counts the step as begun."""
    optimizer, keys, tables = store.optimizer, store.begin_fused_update(num_rows, lr, step), store.row_state()
    names = [name for name, width in optimizer.state_widths().items() if width == "row"]
    wide: dict[str, Any] = {"centre_key": gpu.signed(keys["centres"])}
    for part, name in zip(("first", "second"), names, strict=False):
        wide |= {f"{part}_key": gpu.signed(keys[name]), f"{part}_ptr": tables[name]}
    match optimizer:
        case RowSGD():
            settings = {"OPTIMIZER": gpu.SGD.value, "NESTEROV": optimizer.nesterov, "beta1": optimizer.momentum}
        case RowAdamW():
            beta1, beta2 = optimizer.beta1, optimizer.beta2
            settings = {"beta1": beta1, "weight1": 1 - beta1, "beta2": beta2, "weight2": 1 - beta2}
            settings |= {"LOG_BETA1": gpu.log(beta1), "LOG_BETA2": gpu.log(beta2)}
            settings |= {"OPTIMIZER": gpu.ADAMW.value, "eps": optimizer.eps, "keep": 1 - lr * optimizer.weight_decay}
            settings |= {"steps_ptr": tables["num_steps"]}
        case RowAdagrad():
            settings = {"OPTIMIZER": gpu.ROW_ADAGRAD.value, "eps": optimizer.eps, "scalar_ptr": tables["square_sum"]}
        case _:
            raise TypeError(f"triton_update.py does not have {optimizer}")
    rest = {"lr": lr, "decay": optimizer.weight_decay, "touched_ptr": tables["touched"]}
    return {**gradient_only(), **wide, **settings, **rest, "first_row": store.first_row, "touched_step": step + 1}


def can_move(store: "RowTable", centre_LD: Tensor) -> bool:
    """Whether `optimizer_step` can move these centres: the table's own, in dtypes that the kernel computes with."""
    tables = store.row_state() if centre_LD.data_ptr() == store.centre_LD.data_ptr() else {}
    return bool(tables) and all(table.dtype != torch.float64 for table in tables.values())


class Finish:
    """Launches `finish_rows` for each chunk of a pass. step: the optimizer's arguments."""

    def __init__(self, logits: Logits, logit_grad: LogitGrad, step: dict[str, Any]):
        self._logits, self._step = logits, step
        self._unit_GD = logits.unit_GD.contiguous()
        self._target_grad_G = logit_grad.target_grad_G.float()
        # The targets by their centre: those of place k are order[own[k]] to order[own[k + 1] - 1].
        position_N, self._order_N = logits.target_G.flatten().sort(stable=True)
        places = torch.arange(logits.num_sampled + 1, device=position_N.device)
        self._own_S = torch.searchsorted(position_N, places, out_int32=True)
        self._blocks = gpu.row_blocks(logits.unit_GD.shape[1])

    def __call__(self, begin: int, size: int, sum_KD: Tensor) -> None:
        """Places begin to begin + size; sum_KD: their sums over the features."""
        centre_LD, row_S = self._logits.centre_LD, self._logits.row_S
        finish_rows[(triton.cdiv(size, self._blocks["BLOCK_K"]),)](
            sum_KD, self._unit_GD, self._order_N, self._own_S[begin:], self._target_grad_G,
            centre_LD, None if row_S is None else row_S[begin:], centre_LD.stride(0), size, begin,
            **self._step, LABELS=self._logits.target_GT.shape[1], D=centre_LD.shape[1], **self._blocks,
        )  # fmt: skip
