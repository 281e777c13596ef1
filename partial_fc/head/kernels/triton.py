"""The kernel for GPUs, in Triton: triton_pass.py launches the functions of triton_kernels.py. Speed: benchmarks.md.

A chunk of at most 65,536 centres is read where it lies, through row_S; its exponentials, (G, K) in the products' dtype,
go through memory between two products. To keep them on the chip instead, as attention kernels do, a program would have
to hold sums as wide as a feature: at D = 512 those alone fill the registers, and tiles would become so narrow that
reading them, not multiplying, took the time. But for
what is kept for the second pass, the memory does not grow with the number of classes.

Products, counted in 2 * G * S * D: `sums` 2, and 3 beyond |logit| of about 64, as the largest logit is looked for
first. The second pass takes 1 where the first one's weights are kept (2 * G * S bytes, at most
EXP_CACHE_BYTES), else 2. Sub-centres cost one more each time that logits are formed.

Nothing is added in an order that can vary, and tile sizes come from a table, not from a stopwatch: results repeat bit
by bit on one kind of device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partial_fc.head.kernels import Kernel, LogitGrad, Logits, Precision, Sums
from partial_fc.head.kernels import triton_kernels as device_side
from partial_fc.head.kernels.nearest import Nearest
from partial_fc.head.kernels.plain import PlainKernel
from partial_fc.head.kernels.triton_choice import DeviceChoice
from partial_fc.head.kernels.triton_pass import Pass, Tiles, tiles_for
from partial_fc.head.kernels.triton_rows import FusedRowMath
from partial_fc.head.kernels.triton_update import Finish, can_move, gradient_only, optimizer_step
from partial_fc.head.selection.sampling import Draw
from partial_fc.head.shard import Shard
from partial_fc.head.softmax import RowMath

if TYPE_CHECKING:
    from partial_fc.head.rows import RowTable

# A row's exponentials are relative to a shift that takes the largest possible one to exp(42): times the inverse of the
# smallest length that has one (1e19) it is in fp32's range, and so is the smallest, exp(-87), while |logit| <= 64.5.
TOP_EXPONENT = 42.0
LOG2_E = device_side.LOG2_E.value
LARGEST_LOGIT_WITH_FIXED_SHIFT = 64.5
# Of the first pass' weights that the second one reads: 2 bytes for each feature and place. What does not fit is formed
# again, to the same bits. An offset into them is an int32.
EXP_CACHE_BYTES = 1 << 30
SPARE = 512  # columns after the last, or up to 63 fewer, for tiles that reach beyond it


def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs on a device: on GPUs, on others only in Triton's interpreter, for tests."""
    return device.type == "cuda" or bool(device_side.INTERPRETED.value)


@dataclass(frozen=True)
class Kept:
    """Weights that the first pass keeps for the second: Sums.cache."""

    shift_G: Tensor
    weight_GS: Tensor
    places: int  # the first ones, whose weights are in it

    def weights(self, begin: int, end: int) -> Tensor | None:
        """Returns the weights of the places begin to end, and up to SPARE columns more; None if some were not kept."""
        return self.weight_GS[:, begin:] if end <= self.places else None


def kept_places(num_sampled: int, chunk_rows: int, padded_rows: int, operands: torch.dtype) -> int:
    """Returns how many places' weights are kept for the second pass: all, or as many whole chunks as there is room for.
    With fp32 operands none: forming them costs what reading them saves."""
    if operands != torch.bfloat16:
        return 0
    most = EXP_CACHE_BYTES // (2 * padded_rows) - SPARE
    return num_sampled if num_sampled <= most else max(0, most // chunk_rows * chunk_rows)


class TritonKernel(Kernel):
    """The kernel in Triton, float32. unit_GD is float32; centres are float32, bfloat16 or float16 and lie on the
    features' device.

    precision: of the products' operands, "bf16" or "fp32"; their sums, logits and exponentials are fp32 either way.
    tiles: instead of those of the device's generation.
    """

    name = "triton"

    def __init__(self, precision: Precision = "bf16", tiles: Tiles | None = None):
        self.precision: Precision = precision
        self.operands = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        self.tiles = tiles
        self._room = torch.empty(0, dtype=self.operands)
        self._kept: Kept | None = None  # whose weights are in it: Sums.cache of the last pass

    def row_math(self) -> RowMath:
        return FusedRowMath()

    def selector(self, sampling: Draw, shard: Shard, device: torch.device) -> DeviceChoice | None:
        return DeviceChoice(sampling, shard, device) if sampling.quota == "negatives" else None

    def sums(self, logits: Logits, with_weighted_sum: bool = True, num_nearest: int = 0) -> Sums:
        if not logits.negatives.is_cosine:
            return PlainKernel().sums(logits, with_weighted_sum, num_nearest)
        over = self._pass(logits)
        shift_G = self._shift(over)
        by_feature = over.new_by_feature()
        splits = over.new_splits() if with_weighted_sum else None
        kept = self._keep(over, shift_G) if with_weighted_sum else None
        blocks = over.new_blocks(num_nearest) if num_nearest else None
        for begin, end in over.chunks():
            weight_GK = None
            if kept is not None:
                weight_GK = kept.weights(begin, end)
                weight_GK = over.scratch_GK if weight_GK is None else weight_GK
            chunk = over.read(begin, end)
            over.weigh(chunk, device_side.SUMS.value, shift_G, weight_GK, by_feature, blocks)
            if splits is not None and weight_GK is not None:
                over.weighted_sum(chunk, weight_GK, splits)
        denominator_G, weighted_sum_GD = over.add_up(by_feature, splits, shift_G)
        nearest = None if blocks is None else over.nearest(blocks, num_nearest)
        return Sums(denominator_G, weighted_sum_GD, kept, nearest)

    def nearest(self, logits: Logits, k: int) -> Nearest:
        over = TritonKernel("fp32")._pass(logits)
        blocks, zero_G = over.new_blocks(k), over.new(over.padded_rows).zero_()
        for begin, end in over.chunks():
            over.weigh(over.read(begin, end), device_side.SUMS.value, zero_G, blocks=blocks)
        return over.nearest(blocks, k)

    def _keep(self, over: Pass, shift_G: Tensor) -> Kept:
        """Room for the weights of a pass, which takes it over from the last one."""
        self._kept = None
        places = kept_places(over.logits.num_sampled, over.chunk_rows, over.padded_rows, self.operands)
        size = over.padded_rows * (places + SPARE - places % 64)  # rows of whole cache lines
        if places and (self._room.numel() < size or self._room.device != shift_G.device):
            self._room = torch.empty(0, dtype=self.operands)  # not two at a time
            self._room = over.new(size, dtype=self.operands)
        weight_GS = self._room[: size if places else 0].view(over.padded_rows, -1)
        self._kept = Kept(shift_G, weight_GS, places)
        return self._kept

    def centre_gradients(self, logits: Logits, logit_grad: LogitGrad) -> Iterator[tuple[int, int, Tensor]]:
        if logits.negatives.is_cosine:
            yield from self._finished(logits, logit_grad, gradient_only())
        else:
            yield from PlainKernel().centre_gradients(logits, logit_grad)

    def update(self, logits: Logits, logit_grad: LogitGrad, store: "RowTable", lr: float, step: int) -> bool:
        """Updates the centres for every optimizer, but not copies of rows that are stored elsewhere."""
        if not can_move(store, logits.centre_LD) or not logits.negatives.is_cosine:
            return False
        for _ in self._finished(logits, logit_grad, optimizer_step(store, logits.num_sampled, lr, step)):
            pass
        return True

    def _finished(
        self, logits: Logits, logit_grad: LogitGrad, step: dict[str, Any]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, the chunk that finish_rows has finished), with the optimizer's arguments `step`."""
        over = self._pass(logits, second=True)
        kept = logit_grad.cache if isinstance(logit_grad.cache, Kept) else None
        shift_G = self._shift(over) if kept is None else kept.shift_G
        if kept is not self._kept:  # another pass has come since
            kept = None
        x_GD = over.read_features(logit_grad.factor_G, shift_G)
        finish = Finish(logits, logit_grad, step)
        sum_KD = logits.unit_GD.new_empty(over.chunk_rows, over.width)
        for begin, end in over.chunks():
            weight_GK = None if kept is None else kept.weights(begin, end)
            if weight_GK is None:
                weight_GK = over.scratch_GK
                over.weigh(over.read(begin, end), device_side.SUMS.value, shift_G, weight_GK)
            over.pull(weight_GK, x_GD, sum_KD[: end - begin])
            finish(begin, end - begin, sum_KD)
            yield begin, end, sum_KD[: end - begin]

    def _pass(self, logits: Logits, second: bool = False) -> Pass:
        unit_GD, centre_LD = logits.unit_GD, logits.centre_LD
        if unit_GD.dtype != torch.float32:
            raise ValueError(f"features are {unit_GD.dtype}; Triton's kernel computes in float32: use impl 'plain'")
        if centre_LD.device != unit_GD.device or centre_LD.stride(1) != 1:
            raise ValueError(
                f"centres are on {centre_LD.device} with strides {centre_LD.stride()}, features on {unit_GD.device}; "
                "expected the same device and rows without gaps"
            )
        generation = torch.cuda.get_device_capability(unit_GD.device)[0] if unit_GD.is_cuda else 0
        tiles = self.tiles or tiles_for(generation, self.operands)
        return Pass(logits, self.operands, tiles, second)

    @staticmethod
    def _shift(over: Pass) -> Tensor:
        """What is subtracted from the logits of each row, padded, times log2(e): depends
        on the scale where that allows it, else on the row's largest logit, which takes a pass of its own."""
        bound = over.logits.scale
        if bound <= LARGEST_LOGIT_WITH_FIXED_SHIFT:
            return over.new(over.padded_rows).fill_(max(0.0, bound - TOP_EXPONENT) * LOG2_E)
        if not over.logits.num_sampled:
            return over.new(over.padded_rows).zero_()
        by_feature, zero_G = over.new_by_feature(), over.new(over.padded_rows).zero_()
        for begin, end in over.chunks():
            over.weigh(over.read(begin, end), device_side.MOST.value, zero_G, by_feature=by_feature)
        most_G = by_feature.amax(dim=0)
        return torch.where(most_G == -torch.inf, 0.0, most_G - TOP_EXPONENT * LOG2_E)
