"""Chooses the classes of a step on the GPU, the drawn ones and the batch's, ascending, in three launches.

Every class of the shard is asked whether it takes part: one byte for each. That is more than the draw alone would
touch, but needs no sort, no shape that depends on a number, and no wait: 10 million classes are 40 MB a step. The draw
is that of `Draw.negatives`, read backwards: not which classes come next in a walk, but where in it a class stands.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from partial_fc.head.selection.sampling import BLOCK, Draw, inverse_tables, send
from partial_fc.head.shard import Shard

# Walks are computed for some steps at once: on the host, in about 25 small operations.
_STEPS_AHEAD = 32
_AT_A_TIME = 1024  # labels, or blocks
_WARPS = 16  # for a block of classes: fewer would have no registers for it

CERTAIN = tl.constexpr(1)  # is in the batch, or listed as hard for one that is
DRAWN = tl.constexpr(2)  # takes part because it was drawn
_MOST = tl.constexpr((1 << 63) - 1)


@triton.jit
def _mark(class_K, there, taken_ptr, start, num_local):
    local = class_K - start
    tl.store(taken_ptr + local, CERTAIN, mask=there & (local >= 0) & (local < num_local))


@triton.jit(do_not_specialize=["G", "num_listed", "origin_stride", "start", "num_local"])
def look_at_labels(
    label_ptr, origin_ptr, origin_stride, expected_ptr, listed_ptr, taken_ptr, numbers_ptr,
    G, num_listed, start, num_local, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """numbers: the smallest label, the largest, how many origins are not what was expected. Marks the classes of the
    batch, and those listed, that are here. One program: it takes a microsecond for 1,024 labels."""
    lowest = tl.full((BLOCK_K,), _MOST, tl.int64)
    highest = -lowest
    changed = tl.zeros((BLOCK_K,), tl.int64)
    for first in range(0, G, BLOCK_K):
        g = first + tl.arange(0, BLOCK_K)
        there = g < G
        label = tl.load(label_ptr + g, mask=there, other=0)
        lowest = tl.minimum(lowest, tl.where(there, label, lowest))
        highest = tl.maximum(highest, tl.where(there, label, highest))
        origin = tl.load(origin_ptr + g * origin_stride, mask=there, other=0)
        changed += (origin != tl.load(expected_ptr + g, mask=there, other=0)).to(tl.int64)
        if taken_ptr is not None:
            _mark(label, there, taken_ptr, start, num_local)
    if listed_ptr is not None:
        for first in range(0, num_listed, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            _mark(tl.load(listed_ptr + k, mask=k < num_listed, other=-1), k < num_listed, taken_ptr, start, num_local)
    tl.store(numbers_ptr, tl.min(lowest, axis=0))
    tl.store(numbers_ptr + 1, tl.max(highest, axis=0))
    tl.store(numbers_ptr + 2, tl.sum(changed, axis=0))


@triton.jit(do_not_specialize=["before", "num_local", "num_blocks", "last_size"])
def draw(
    numbers_ptr, table_ptr, position_ptr, taken_ptr, count_ptr, before, num_local, num_blocks, last_size,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Adds the drawn classes of a block to `taken`, and counts those that take part. before: places of the first block
    that belong to another rank; last_size: of the last block, where it has fewer classes than others, else 0."""
    block = tl.program_id(0)
    place = tl.arange(0, SIZE)
    local = block.to(tl.int64) * SIZE + place - before
    here = (local >= 0) & (local < num_local)
    key_1 = tl.load(numbers_ptr + block)
    key_2 = tl.load(numbers_ptr + num_blocks + block)
    key_3 = tl.load(numbers_ptr + 2 * num_blocks + block)
    begin = tl.load(numbers_ptr + 3 * num_blocks + block)
    count = tl.load(numbers_ptr + 4 * num_blocks + block)
    second = tl.load(table_ptr + SIZE + ((place - key_3) & (SIZE - 1)))
    first = tl.load(table_ptr + (second ^ key_2))
    along = (first - key_1 - begin) & (SIZE - 1)
    if position_ptr is not None:  # noqa: SIM102  (what is compiled without it must not see the load)
        if (last_size > 0) & (block == num_blocks - 1):
            along = tl.load(position_ptr + place, mask=place < last_size, other=-1) - begin
    is_drawn = here & (along >= 0) & (along < count)
    taken = tl.load(taken_ptr + local, mask=here, other=0)
    taken = tl.where(is_drawn & (taken == 0), DRAWN, taken).to(tl.uint8)
    tl.store(taken_ptr + local, taken, mask=here)
    tl.store(count_ptr + block, tl.sum((taken > 0).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["before", "num_local", "num_blocks"])
def write_down(
    taken_ptr, count_ptr, class_ptr, numbers_ptr, before, num_local, num_blocks,
    SIZE: tl.constexpr, AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """The classes of a block that take part, after those of the blocks before it; `taken` is 0 again. numbers[3]: how
    many they are in all."""
    block = tl.program_id(0)
    place = tl.arange(0, SIZE)
    local = block.to(tl.int64) * SIZE + place - before
    here = (local >= 0) & (local < num_local)
    earlier = tl.zeros((AT_A_TIME,), tl.int64)
    for first in range(0, block, AT_A_TIME):
        other = first + tl.arange(0, AT_A_TIME)
        earlier += tl.load(count_ptr + other, mask=other < block, other=0)
    begin = tl.sum(earlier, axis=0)
    taken = tl.load(taken_ptr + local, mask=here, other=0)
    takes_part = taken > 0
    at = begin + tl.cumsum(takes_part.to(tl.int32), axis=0) - 1
    tl.store(class_ptr + at, local, mask=takes_part)
    tl.store(taken_ptr + local, tl.zeros((SIZE,), tl.uint8), mask=here)
    if block == num_blocks - 1:
        tl.store(numbers_ptr + 3, begin + tl.sum(takes_part.to(tl.int64), axis=0))


class DeviceChoice:
    """Looks at a batch's labels and chooses its classes on the device. Keeps a byte for each class of the shard."""

    def __init__(self, sampling: Draw, shard: Shard, device: torch.device):
        self._sampling, self._shard, self._device = sampling, shard, device
        self._numbers = torch.zeros(4, dtype=torch.int64, device=device)
        if sampling.rate < 1.0:
            self._taken_L = torch.zeros(len(shard), dtype=torch.uint8, device=device)
            self._tables = send(inverse_tables(sampling.seed), device)
            self._steps = range(0)  # whose walks are on the device
            self._first_block = shard.start // BLOCK
            self._num_blocks = -(-shard.stop // BLOCK) - self._first_block
            has_last = shard.stop > sampling.num_classes // BLOCK * BLOCK
            self._last_size = sampling.num_classes % BLOCK if has_last else 0
            self._count_N = torch.empty(self._num_blocks, dtype=torch.int32, device=device)

    def prepare(self, step: int) -> None:
        """Sends the walks of some steps, from this one on."""
        if step in self._steps:
            return
        self._steps = range(step, step + _STEPS_AHEAD)
        walk_M5N, position_MQ = self._sampling.walks(self._steps, self._shard)
        self._most = int(walk_M5N[:, 4].sum(dim=1).max())  # of the host
        self._walk_M5N = send(walk_M5N, self._device)
        self._position_MQ = None if position_MQ is None else send(position_MQ, self._device)

    def choose(
        self, label_G: Tensor, origin_G: Tensor, expected_G: Tensor, listed_M: Tensor | None, step: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (the smallest label, the largest, how many rows have another origin than expected, how many of the
        classes chosen count), int64, and these classes, numbered from 0 in the shard, ascending; None: all. Labels may
        be any integers. listed_M: classes that take part, too, or -1."""
        shard = self._shard
        taken_L, listed_M = (None, None) if self._sampling.rate == 1.0 else (self._taken_L, listed_M)
        num_listed = 0 if listed_M is None else len(listed_M)
        look_at_labels[(1,)](
            label_G, origin_G, origin_G.stride(0), expected_G, listed_M, taken_L, self._numbers,
            len(label_G), num_listed, shard.start, len(shard), BLOCK_K=_AT_A_TIME,
        )  # fmt: skip
        if taken_L is None:
            return self._numbers, None
        self.prepare(step)
        nth, before = step - self._steps.start, shard.start - self._first_block * BLOCK
        class_P = label_G.new_empty(min(len(shard), self._most + len(label_G) + num_listed))
        if self._num_blocks:
            position_Q = None if self._position_MQ is None else self._position_MQ[nth]
            draw[(self._num_blocks,)](
                self._walk_M5N[nth], self._tables, position_Q, taken_L, self._count_N,
                before, len(shard), self._num_blocks, self._last_size, SIZE=BLOCK, num_warps=_WARPS,
            )  # fmt: skip
            write_down[(self._num_blocks,)](
                taken_L, self._count_N, class_P, self._numbers,
                before, len(shard), self._num_blocks,
                SIZE=BLOCK, AT_A_TIME=_AT_A_TIME, num_warps=_WARPS,
            )  # fmt: skip
        return self._numbers, class_P
