"""Sampling: which classes are negatives in which step. docs/head.md says how it walks through the blocks of classes.

Where 1 / rate is whole, every class comes once in a round. The draw of any step is known without those before it, and
costs O(sampled), in time and in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from partial_fc.counter_rng import derive_key, hash32
from partial_fc.head.shard import Shard

Quota = Literal["negatives", "insightface"]

BLOCK = 4096
_FRACTION_BITS = 20  # of classes a step and block, a fixed-point number: sums over steps are exact
_NONE = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Draw:
    """Negative classes as a function of (seed, step, class). rate: the share of all classes in a step, in (0, 1].
    quota: whether the classes of the batch come on top of it, or are part of it ("insightface", quota.py)."""

    num_classes: int
    rate: float
    seed: int
    quota: Quota = "negatives"

    def __post_init__(self) -> None:
        if self.quota not in get_args(Quota):
            raise ValueError(f"quota is {self.quota!r}; expected one of {', '.join(get_args(Quota))}")
        if not isinstance(self.rate, Real) or not 0.0 < self.rate <= 1.0:
            raise ValueError(f"sample_rate is {self.rate!r}; expected a share of the classes, 0 < rate <= 1")

    @property
    def steps_per_round(self) -> int:
        """Returns the steps of a round of the walks."""
        return int(1.0 / self.rate + 1e-9)

    def counts(self, step: int) -> Tensor:
        """Returns how many negatives of this step each block of classes contributes: int64, on the CPU."""
        full_blocks, more = divmod(self.num_classes, BLOCK)
        parts = [self._turn(torch.arange(full_blocks), BLOCK, step).count_N]
        if more:
            parts.append(self._turn(torch.tensor([full_blocks]), more, step).count_N)
        return torch.cat(parts)

    def negatives(self, step: int, shard: Shard, device: torch.device | str = "cpu") -> Tensor:
        """Returns the negatives of this step in the shard: class numbers, int64, ascending, each once."""
        full_blocks = self.num_classes // BLOCK
        first, last = shard.start // BLOCK, -(-shard.stop // BLOCK)
        device = torch.device(device)
        parts = [torch.empty(0, dtype=torch.int64, device=device)]
        parts += self._full(self._turn(torch.arange(first, min(last, full_blocks)), BLOCK, step), device)
        if last > full_blocks:
            turn = self._turn(torch.tensor([full_blocks]), self.num_classes % BLOCK, step)
            parts.append(self._last(turn).to(device))
        class_S = torch.cat(parts)
        if len(shard) == self.num_classes:
            return class_S
        # Of a block that straddles ranks each keeps its part.
        begin, end = torch.searchsorted(class_S, torch.tensor((shard.start, shard.stop), device=device)).tolist()
        return class_S[begin:end]

    def walks(self, steps: range, shard: Shard) -> tuple[Tensor, Tensor | None]:
        """Returns the walks of a shard's blocks in these steps, for a kernel that draws on a device: int32, on the CPU,
        (steps, 5, blocks): keys 1 to 3, begin, count; and, where the last block has fewer classes, the position of each
        of its places, (steps, places).

        A class is the i-th place of its block. In whole blocks its position along the walk is first the inverse of
        `inverse_tables` 2 of i - key 3, of 1 of that xor key 2, minus key 1, each by 12 bits; it is drawn if that is
        one of `count` from `begin` on.
        """
        full_blocks = self.num_classes // BLOCK
        first, last = shard.start // BLOCK, -(-shard.stop // BLOCK)
        step_M, num_steps = torch.arange(steps.start, steps.stop), len(steps)
        block_N = torch.arange(first, min(last, full_blocks))
        turns = [self._turn(block_N.repeat(num_steps), BLOCK, step_M.repeat_interleave(len(block_N)))]
        position_MQ = None
        if last > full_blocks:
            size = self.num_classes % BLOCK
            turns.append(self._turn(torch.tensor([full_blocks]), size, step_M))
            position_MQ = torch.stack([_position(size, key) for key in turns[-1].key_N.tolist()])
        numbers = [torch.stack(turn.numbers()).view(5, num_steps, len(turn.key_N) // num_steps) for turn in turns]
        return torch.cat(numbers, dim=2).transpose(0, 1).int().contiguous(), position_MQ

    def _turn(self, block_N: Tensor, size: int, step: int | Tensor) -> "_Turn":
        """Returns where blocks, each of `size` classes, are along their walks in this step."""
        n = self.steps_per_round
        # Multiples of the golden ratio: any row of neighbouring blocks is spread evenly over the round.
        spread_N = (block_N * 0x9E3779B9 + derive_key(self.seed, *b"phase")) & 0xFFFFFFFF
        step_N = step + spread_N * min(n, 1 << 31) // (1 << 32)
        round_N = step_N // n
        quota = int(self.rate * size * (1 << _FRACTION_BITS))

        def drawn(steps_N: Tensor) -> Tensor:
            return (steps_N * quota + (1 << _FRACTION_BITS - 1)) >> _FRACTION_BITS

        begin_N = drawn(step_N)
        key_N = hash32(block_N + derive_key(self.seed, *b"negatives")) ^ hash32(round_N + 0x51ED270B)
        return _Turn(block_N, hash32(key_N), begin_N - drawn(round_N * n), drawn(step_N + 1) - begin_N)

    def _full(self, turn: "_Turn", device: torch.device) -> Iterator[Tensor]:
        """Class numbers, ascending, of whole blocks."""
        begin = 0
        for place_NQ, none_NQ in self._walks(turn, device):
            num_blocks = len(place_NQ)
            place_NQ += torch.arange(0, num_blocks * BLOCK, BLOCK, dtype=torch.int32, device=device)[:, None]
            place_NQ.masked_fill_(none_NQ, _NONE)
            drawn = place_NQ.view(-1).sort().values[: int(turn.count_N[begin : begin + num_blocks].sum())]
            yield drawn.long().add_(turn.block_N[begin] * BLOCK)
            begin += num_blocks

    def _walks(self, turn: "_Turn", device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """(places within their blocks, int32; which of them do not count) of whole blocks, in rows of equal length, so
        many rows at a time that what they need stays in cache.

        The permutation of a block: two that all blocks share (tables of 4,096), and before, between and after them
        keys of the block, which are added or xor-ed (an iterated Even-Mansour cipher of 12 bits).
        """
        if not len(turn.block_N):
            return
        table_1, table_2 = _tables(self.seed, device)
        widest = max(1, int(turn.count_N.max()))
        elements = 1 << 16 if device.type == "cpu" else 1 << 24
        num_blocks = min(max(1, elements // widest), _NONE // BLOCK)
        column_Q = torch.arange(widest, dtype=torch.int32, device=device)
        for begin in range(0, len(turn.block_N), num_blocks):
            part = slice(begin, begin + num_blocks)
            numbers_5N1 = torch.stack(turn.numbers(part)).int().unsqueeze(2)
            key_1, key_2, key_3, begin_N1, count_N1 = send(numbers_5N1, device)
            place_NQ = (column_Q + (begin_N1 + key_1)).bitwise_and_(BLOCK - 1)
            place_NQ = table_1.index_select(0, place_NQ.view(-1)).view(place_NQ.shape).bitwise_xor_(key_2)
            place_NQ = table_2.index_select(0, place_NQ.view(-1)).view(place_NQ.shape)
            place_NQ.add_(key_3).bitwise_and_(BLOCK - 1)
            yield place_NQ, column_Q >= count_N1

    def _last(self, turn: "_Turn") -> Tensor:
        """The same for the last block, which has fewer classes: its permutation is sorted out, being small."""
        size = self.num_classes % BLOCK
        begin = int(turn.begin_N)
        order = _shuffled(size, int(turn.key_N))[begin : begin + int(turn.count_N)]
        return order.sort().values + turn.block_N * BLOCK


@dataclass(frozen=True)
class _Turn:
    """A step of each block's walk: the key of its permutation, the first position along it and how many (int64, on the
    CPU)."""

    block_N: Tensor
    key_N: Tensor
    begin_N: Tensor
    count_N: Tensor

    def numbers(self, part: slice = slice(None)) -> tuple[Tensor, ...]:
        """What a walk depends on: its three keys, the first position, how many."""
        key_N = self.key_N[part]
        keys = (key & (BLOCK - 1) for key in (key_N, key_N >> 12, hash32(key_N + 1)))
        return *keys, self.begin_N[part], self.count_N[part]


@lru_cache(maxsize=32)
def _shuffled(size: int, key: int) -> Tensor:
    """A keyed permutation of [0, size), formed as a whole: int64."""
    return hash32(torch.arange(size) + key).argsort()


@lru_cache(maxsize=32)
def _position(size: int, key: int) -> Tensor:
    """Its inverse: int32."""
    return _shuffled(size, key).argsort().int()


def inverse_tables(seed: int) -> Tensor:
    """Returns the inverses of the permutations that all whole blocks share: int32 (2, BLOCK), on the CPU."""
    return torch.stack([_position(BLOCK, derive_key(seed, i, *b"tables")) for i in (1, 2)])


def send(t: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device without waiting."""
    return t if device.type == "cpu" else t.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=8)
def _tables(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = (_shuffled(BLOCK, derive_key(seed, i, *b"tables")).int().to(device) for i in (1, 2))
    return first, second
