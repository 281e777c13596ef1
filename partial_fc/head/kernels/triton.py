"""The kernel for GPUs, in Triton. triton_pass.py launches what triton_kernels.py defines. Speed: not measured yet.

A chunk of at most 65,536 centres is read where it lies, through row_S; its exponentials, (G, K) in the products' dtype,
go through memory between two products. To keep them on the chip instead, as attention kernels do, a program would have
to hold sums as wide as a feature: at D = 512 those alone fill the registers, and tiles would become so narrow that
reading them, not multiplying, took the time. The memory does not grow with the number of classes.

Products, counted in 2 * G * S * D: `sums` 2, `centre_gradients` 2, since the logits are formed again. Beyond |logit| of
about 64 `sums` takes 3, as the largest logit is looked for first; sub-centres cost one more each time.

Nothing is added in an order that can vary, and tile sizes come from a table, not from a stopwatch: results repeat bit
by bit on one kind of device.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partial_fc.head.kernels import Kernel, LogitGrad, Logits, Precision, Sums
from partial_fc.head.kernels import triton_kernels as device_side
from partial_fc.head.kernels.triton_pass import Pass, Tiles, tiles_for
from partial_fc.head.kernels.triton_update import Finish, can_move, gradient_only, optimizer_step

if TYPE_CHECKING:
    from partial_fc.head.rows import RowTable

# A row's exponentials are relative to a shift that takes the largest possible one to exp(42): times the inverse of the
# smallest length that has one (1e19) it is in fp32's range, and so is the smallest, exp(-87), while |logit| <= 64.5.
TOP_EXPONENT = 42.0
LARGEST_LOGIT_WITH_FIXED_SHIFT = 64.5
# Of a row's factor, relative to its shift. It is larger only where all exponentials of the row are at the end of what
# fp32 can tell from 0, every class being opposite to the feature; the gradient is then too small, instead of infinite.
LARGEST_FACTOR = 2.0**120


def runs_on(device: torch.device) -> bool:
    """On GPUs; on others only in Triton's interpreter, for tests."""
    return device.type == "cuda" or bool(device_side.INTERPRETED.value)


class TritonKernel(Kernel):
    """See `Kernel`. unit_GD is float32; centres are float32, bfloat16 or float16 and lie on the features' device.

    precision: of the products' operands, "bf16" or "fp32"; their sums, logits and exponentials are fp32 either way.
    tiles: instead of those of the device's generation.
    """

    name = "triton"

    def __init__(self, precision: Precision = "bf16", tiles: Tiles | None = None):
        self.operands = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        self.tiles = tiles

    def sums(self, logits: Logits, with_weighted_sum: bool = True, with_centre_sum: bool = False) -> Sums:
        over = self._pass(logits)
        shift_G = self._shift(over)
        sum_G = torch.zeros_like(shift_G, dtype=torch.float64)
        splits = over.new_splits() if with_weighted_sum else None
        totals = over.new_totals() if with_centre_sum else None
        weight_GK = over.weight_GK if with_weighted_sum else None
        for chunk in over.chunks():
            by_tile = over.weigh(chunk, device_side.SUMS.value, shift_G, weight_GK)
            sum_G += by_tile.sum(dim=0, dtype=torch.float64)
            if splits is not None:
                over.weighted_sum(chunk, splits)
            if totals is not None:
                over.centre_sum(chunk, totals)
        sum_G, shift_G = sum_G[: over.num_rows], shift_G[: over.num_rows]
        weighted_sum_GD = centre_sum_D = None
        if splits is not None:
            weighted_sum_GD = splits.sum(dim=0)[: over.num_rows, : over.width]
            weighted_sum_GD = weighted_sum_GD / torch.where(sum_G == 0, 1.0, sum_G).float()[:, None]
        if totals is not None:
            centre_sum_D = totals.sum(dim=0)[: over.width]
        return Sums(sum_G * shift_G.double().exp(), weighted_sum_GD, centre_sum_D)

    def centre_gradients(self, logits: Logits, logit_grad: LogitGrad) -> Iterator[tuple[int, int, Tensor]]:
        yield from self._finished(logits, logit_grad, gradient_only())

    def update(self, logits: Logits, logit_grad: LogitGrad, store: "RowTable", lr: float, step: int) -> bool:
        """For every optimizer; not where the centres are copies of rows that lie elsewhere."""
        if not can_move(store, logits.centre_LD):
            return False
        for _ in self._finished(logits, logit_grad, optimizer_step(store, lr, step)):
            pass
        return True

    def _finished(
        self, logits: Logits, logit_grad: LogitGrad, step: dict[str, Any]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, the chunk that finish_rows has finished), with the optimizer's arguments `step`."""
        over = self._pass(logits)
        shift_G = self._shift(over)
        factor_G = logit_grad.factor_G.double() * shift_G[: over.num_rows].double().exp()
        x_GD = over.operand(logits.unit_GD * factor_G.clamp(-LARGEST_FACTOR, LARGEST_FACTOR).float()[:, None])
        finish = Finish(logits, logit_grad, step)
        sum_KD = logits.unit_GD.new_empty(over.chunk_rows, over.width)
        for chunk in over.chunks():
            over.weigh(chunk, device_side.SUMS.value, shift_G, over.weight_GK, with_sums=False)
            over.pull(chunk, x_GD, sum_KD)
            finish(chunk.begin, chunk.size, sum_KD)
            yield chunk.begin, chunk.begin + chunk.size, sum_KD[: chunk.size]

    def _pass(self, logits: Logits) -> Pass:
        unit_GD, centre_LD = logits.unit_GD, logits.centre_LD
        if unit_GD.dtype != torch.float32:
            raise ValueError(f"features are {unit_GD.dtype}; Triton's kernel computes in float32: use impl 'plain'")
        if centre_LD.device != unit_GD.device or centre_LD.stride(1) != 1:
            raise ValueError(
                f"centres are on {centre_LD.device} with strides {centre_LD.stride()}, features on {unit_GD.device}; "
                "expected the same device and rows without gaps"
            )
        generation = torch.cuda.get_device_capability(unit_GD.device)[0] if unit_GD.is_cuda else 0
        tiles = self.tiles or tiles_for(generation, self.operands, centre_LD.dtype)
        return Pass(logits, self.operands, tiles)

    @staticmethod
    def _shift(over: Pass) -> Tensor:
        """What is subtracted from the logits of each row, padded: depends on bounds where they allow it, else on the
        row's largest logit, which takes a pass of its own."""
        negatives, bias_S = over.logits.negatives, over.logits.bias_S
        bound = over.logits.scale
        if negatives.hard_G is not None:
            bound *= 1.0 + abs(negatives.hard_t)
        if bias_S is not None and len(bias_S):
            bound += float(bias_S.abs().max())
        if bound <= LARGEST_LOGIT_WITH_FIXED_SHIFT:
            return torch.full_like(over.zero_G, max(0.0, bound - TOP_EXPONENT))
        most_G = torch.full_like(over.zero_G, -torch.inf)
        for chunk in over.chunks():
            by_tile = over.weigh(chunk, device_side.MOST.value, over.zero_G)
            most_G = torch.maximum(most_G, by_tile.amax(dim=0))
        return torch.where(most_G == -torch.inf, 0.0, most_G - TOP_EXPONENT)
