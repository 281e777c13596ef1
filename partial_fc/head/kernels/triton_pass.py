"""Launches triton_kernels.py for one pass over the centres: tile sizes, buffers, launches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from partial_fc.head.kernels import Logits
from partial_fc.head.kernels import triton_kernels as device_side
from partial_fc.head.kernels.nearest import Nearest
from partial_fc.head.kernels.triton_kernels import LOG2_E, row_blocks
from partial_fc.head.kernels.unit import divisor

CHUNK_ROWS = 1 << 16
# Of a chunk's weights, of its centres copied for the products, and of its gradient: each is at most this large. Chunks
# that stay in the L2 cache, of 1 << 24, are so many that the host, at some 40 us a launch, takes three times as long as
# an H100.
CHUNK_BYTES = 1 << 27
SPREAD_PLACES = 1 << 13  # of a chunk, where tiles are made narrower; both passes have to choose the same
ROW_BLOCK = 16  # centres at a time where nothing is multiplied
TILES_AT_A_TIME = 128  # of which partial sums are added up
CANDIDATE_BYTES = 1 << 26  # of centres copied at a time, where the nearest classes are looked for among candidates


@dataclass(frozen=True)
class Tile:
    """The tile of a product that a program computes: (rows, columns), `depth` of the summed dimension at a time. Powers
    of 2, at least 16. resident: of logits only: programs of a multiprocessor that stay for all tiles, and read through
    the copy engine of Hopper; 0: a program a tile."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    resident: int = 0

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}

    def within(self, rows: int, columns: int, depth: int) -> "Tile":
        """No larger than a product of this size needs."""
        return replace(
            self,
            rows=min(self.rows, _power_of_2(rows)),
            columns=min(self.columns, _power_of_2(columns)),
            depth=min(self.depth, _power_of_2(depth)),
        )

    def spread(self, rows: int, columns: int, processors: int) -> "Tile":
        """Narrower, while a product of this size would leave multiprocessors without a program."""
        tile = self
        while tile.columns > 64 and triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) < processors:
            tile = replace(tile, columns=tile.columns // 2)
        return tile


@dataclass(frozen=True)
class Tiles:
    """The tiles of the four products."""

    logits: Tile  # (features, places)
    ruled: Tile  # the same, where more than the own class sets a logit apart: what that takes would not fit registers
    weighted_sum: Tile  # (features, width)
    gradient: Tile  # (places, width)


# Of Hopper the fastest of those that were tried on an H100 and an H200 (docs/benchmarks.md), but for `ruled`. Those of
# other generations are chosen by arithmetic, from registers and shared memory. A test compiles them.
HOPPER = Tiles(Tile(128, 128, 64, 4, 3, 2), Tile(128, 64, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3))
# Its wide sums lie outside of the registers, and what is done with logits is as much again.
BLACKWELL = Tiles(Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4), Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 4))
AMPERE = Tiles(Tile(128, 128, 32, 8, 3), Tile(128, 64, 32, 8, 3), Tile(128, 128, 32, 8, 3), Tile(128, 128, 32, 8, 3))
# Products of fp32 run outside of the tensor cores.
FP32 = Tiles(Tile(64, 64, 32, 4, 2), Tile(64, 64, 32, 4, 2), Tile(64, 64, 32, 4, 2), Tile(64, 64, 32, 4, 2))
INTERPRETER = Tiles(Tile(32, 64, 64, 1, 1), Tile(32, 64, 64, 1, 1), Tile(32, 64, 32, 1, 1), Tile(64, 64, 32, 1, 1))


def tiles_for(generation: int, operands: torch.dtype) -> Tiles:
    """Returns the tiles for a device. generation: the first part of the device's compute capability. The Blackwell of
    12 has no more shared memory than the smaller ones of Ampere."""
    if device_side.INTERPRETED.value:
        return INTERPRETER
    if operands == torch.float32:
        return FP32
    return {9: HOPPER, 10: BLACKWELL}.get(generation, AMPERE)


@dataclass(frozen=True)
class Chunk:
    """The places begin to begin + size of row_S with their centres, rows and lengths."""

    begin: int
    size: int
    centre: Tensor
    row: Tensor | None
    operand: Tensor  # the centres as the products read them: (K, D), or copies in (K, padded D)
    inverse_K: Tensor  # 1 / length, 0 past the end

    @property
    def stored(self) -> tuple[Tensor, Tensor | None, int]:
        return self.centre, self.row, self.centre.stride(0)

    @property
    def operands(self) -> tuple[Tensor, int]:
        return self.operand, self.operand.stride(0)


class Pass:
    """One pass over the centres. G, D and K, a chunk's number of places, are padded to whole tiles in everything that
    the GPU reads.

    Memory: scratch_GK and _copies_KD, where they are needed (each at most CHUNK_BYTES), `splits`' copies of (G, D) in
    fp32, and 4 bytes of partial sums for each feature and tile of places.
    """

    def __init__(self, logits: Logits, operands: torch.dtype, tiles: Tiles, second: bool = False):
        self.logits = logits
        self.num_rows, self.width = logits.unit_GD.shape
        self.num_labels = logits.target_GT.shape[1]
        ruled = logits.negatives.filter_above is not None or logits.sub_centres > 1
        logits_tile = (tiles.ruled if ruled else tiles.logits).within(self.num_rows, logits.num_sampled, self.width)
        self.processors = 4
        if logits.unit_GD.is_cuda:
            self.processors = torch.cuda.get_device_properties(logits.unit_GD.device).multi_processor_count
        logits_tile = logits_tile.spread(self.num_rows, min(logits.num_sampled, SPREAD_PLACES), self.processors)
        sum_tile = tiles.weighted_sum.within(self.num_rows, self.width, logits.num_sampled)
        gradient_tile = tiles.gradient.within(logits.num_sampled, self.width, self.num_rows)
        gradient_tile = gradient_tile.spread(min(logits.num_sampled, SPREAD_PLACES), self.width, self.processors)
        self.tiles = Tiles(logits_tile, logits_tile, sum_tile, gradient_tile)
        self.padded_rows = _whole(self.num_rows, max(logits_tile.rows, sum_tile.rows, gradient_tile.depth))
        self.padded_width = _whole(self.width, max(logits_tile.depth, sum_tile.columns, gradient_tile.columns))
        self._operands = operands
        stored = logits.centre_LD
        self.copied = logits.row_S is not None or stored.dtype != operands or self.width != self.padded_width
        self.copied |= CHUNK_ROWS * stored.stride(0) >= 1 << 31  # an offset into a chunk is an int32
        # Bytes of a place: its weights; its centre, copied or for the gradient's product summed up.
        sizes = [self.padded_rows * operands.itemsize, self.width * 4 if second else 0]
        sizes.append(self.padded_width * operands.itemsize if self.copied else 0)
        most = min(CHUNK_ROWS, *(CHUNK_BYTES // size for size in sizes if size))
        whole_classes = math.lcm(logits.sub_centres, 16)  # and 16 places, so that pieces of row_S stay aligned
        self.chunk_rows = min(max(1, logits.num_sampled), max(whole_classes, most - most % whole_classes))
        self.padded_chunk = _whole(self.chunk_rows, max(logits_tile.columns, sum_tile.depth, gradient_tile.rows))
        self.widths = {"D": self.width, "D_PAD": self.padded_width}

    @cached_property
    def scratch_GK(self) -> Tensor:
        """Weights of a chunk, where they are not kept."""
        return self.new(self.padded_rows, self.padded_chunk, dtype=self._operands)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.unit_GD.device)

    @cached_property
    def features(self) -> tuple[Tensor, Tensor]:
        """The features as the products read them, and the places of their targets' classes: both padded."""
        target_class_TG = self.new(self.num_labels, self.padded_rows, dtype=torch.int32)
        return self.read_features(target_class_TG=target_class_TG), target_class_TG

    def read_features(
        self, factor_G: Tensor | None = None, shift_G: Tensor | None = None, target_class_TG: Tensor | None = None
    ) -> Tensor:
        """(G, D) as the products read them; for the gradient's, times factor * 2 ** shift, and shrunk."""
        operand_GD = self.new(self.padded_rows, self.padded_width, dtype=self._operands)
        blocks = row_blocks(self.padded_width)
        device_side.read_features[(triton.cdiv(self.padded_rows, blocks["BLOCK_K"]),)](
            self.logits.unit_GD.contiguous(), factor_G, shift_G,
            None if target_class_TG is None else self.logits.target_G, operand_GD, target_class_TG,
            self.num_rows, self.padded_rows, LABELS=self.num_labels, SUB_CENTRES=self.logits.sub_centres,
            **self.widths, **blocks,
        )  # fmt: skip
        return operand_GD

    @cached_property
    def _copies_KD(self) -> Tensor:
        return self.new(self.padded_chunk, self.padded_width, dtype=self._operands)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(begin, end), ascending: whole classes."""
        for begin in range(0, self.logits.num_sampled, self.chunk_rows):
            yield begin, min(begin + self.chunk_rows, self.logits.num_sampled)

    def read(self, begin: int, end: int) -> Chunk:
        """Reads the centres of a chunk, so that logits can be formed."""
        centre, row = self.logits.centre_LD, self.logits.row_S
        here = centre[begin:end] if row is None else centre
        chunk = Chunk(
            begin,
            end - begin,
            here,
            None if row is None else row[begin:end],
            self._copies_KD if self.copied else here,
            self.new(self.padded_chunk),
        )
        device_side.read_centres[(self.padded_chunk // ROW_BLOCK,)](
            *chunk.stored, self._copies_KD if self.copied else None, chunk.inverse_K, chunk.size,
            **self.widths, BLOCK_K=ROW_BLOCK, BLOCK_D=self.tiles.gradient.columns,
        )  # fmt: skip
        return chunk

    def weigh(
        self,
        chunk: Chunk,
        what: int,
        shift_G: Tensor,
        weight_GK: Tensor | None = None,
        by_feature: Tensor | None = None,
        blocks: Nearest | None = None,
    ) -> None:
        """Fills weight_GK, to whole tiles, and the chunk's part of `new_by_feature`; adds the chunk's blocks and their
        largest cosines to `blocks`."""
        tile, filter_above = self.tiles.logits, self.logits.negatives.filter_above
        num_g, num_k = self.padded_rows // tile.rows, triton.cdiv(chunk.size, tile.columns)
        if by_feature is not None:
            by_feature = by_feature[self._tiles_before(chunk.begin) :]
        wants_logits = weight_GK is not None or by_feature is not None
        nearest_GK = self._nearest_sub_centres(chunk) if wants_logits and self.logits.sub_centres > 1 else None
        largest_GN = None
        if blocks is not None:
            largest_GN = self.new(self.padded_rows, triton.cdiv(self.padded_chunk, device_side.BLOCK.value))
        x_GD, target_class_TG = self.features
        x: Any = x_GD
        operand: Any = chunk.operand
        programs = num_g * num_k
        if tile.resident:
            x = TensorDescriptor.from_tensor(x_GD, [tile.rows, tile.depth])
            operand = TensorDescriptor.from_tensor(chunk.operand[: chunk.size], [tile.columns, tile.depth])
            programs = min(programs, tile.resident * self.processors)
        device_side.weigh[(programs,)](
            x, operand, chunk.operand.stride(0), chunk.inverse_K, nearest_GK,
            target_class_TG, shift_G, weight_GK, by_feature, largest_GN,
            chunk.size, chunk.begin, 0 if weight_GK is None else weight_GK.stride(0), self.padded_rows,
            0 if nearest_GK is None else nearest_GK.shape[1], 0 if largest_GN is None else largest_GN.shape[1],
            float(self.logits.scale) * LOG2_E.value, float(filter_above or 0.0),
            WHAT=what, FILTERED=filter_above is not None, LABELS=self.num_labels,
            SUB_CENTRES=self.logits.sub_centres, D_PAD=self.padded_width, BLOCK_G=tile.rows, BLOCK_K=tile.columns,
            DEPTH=tile.depth, RESIDENT=tile.resident > 0, **tile.launch,
        )  # fmt: skip
        if blocks is not None and largest_GN is not None:
            first = chunk.begin // device_side.BLOCK.value
            number_N = torch.arange(first, first + triton.cdiv(chunk.size, device_side.BLOCK.value), device=x_GD.device)
            blocks.add(largest_GN[: self.num_rows, : len(number_N)], number_N)

    def new_blocks(self, k: int) -> Nearest:
        """For `weigh`: the blocks that hold the k nearest classes. Were one of these elsewhere, each block would have a
        place as near, and so would k classes, as a class has no more than `sub_centres` places."""
        return Nearest(self.num_rows, k * self.logits.sub_centres, torch.float32, self.logits.unit_GD.device)

    def nearest(self, blocks: Nearest, k: int) -> Nearest:
        """Finds the k nearest classes in the blocks of a whole pass. Forms their cosines again, from its operands."""
        logits, device, sub_centres = self.logits, self.logits.unit_GD.device, self.logits.sub_centres
        found = Nearest(self.num_rows, k, torch.float32, device)
        num_classes = logits.num_sampled // sub_centres
        in_block, sub_M = torch.arange(device_side.BLOCK.value, device=device), torch.arange(sub_centres, device=device)
        num_places = blocks.class_GK.shape[1] * len(in_block) * sub_centres
        step = max(1, CANDIDATE_BYTES // (4 * self.width * num_places))
        for begin in range(0, self.num_rows if num_classes else 0, step):
            rows = slice(begin, min(begin + step, self.num_rows))
            place_GN = (blocks.class_GK[rows, :, None] * len(in_block) + in_block).flatten(1)
            class_GN = place_GN.div(sub_centres, rounding_mode="floor").sort(dim=1).values
            out_GN = (class_GN < 0) | (class_GN >= num_classes)
            out_GN[:, 1:] |= class_GN[:, 1:] == class_GN[:, :-1]  # one place of a class stands for it
            row = class_GN.clamp(0, num_classes - 1)[:, :, None] * sub_centres + sub_M
            row = row if logits.row_S is None else logits.row_S[row]
            centre_ND = logits.centre_LD[row.flatten()].float()
            length_N1 = divisor(centre_ND.norm(dim=1, keepdim=True))
            centre_GND = centre_ND.to(self._operands).float().div_(length_N1).unflatten(0, (len(row), -1))
            x_GD1 = self.features[0][rows, : self.width, None].float()
            cos_GN = (centre_GND @ x_GD1).view(row.shape).amax(2).masked_fill_(out_GN, -torch.inf)
            found.cosine_GK[rows], at_GK = cos_GN.topk(k, dim=1)
            found.class_GK[rows] = class_GN.masked_fill_(out_GN, -1).gather(1, at_GK)
        return found

    def new_by_feature(self) -> Tensor:
        """(tiles of places, G), of all chunks."""
        begins = [begin for begin, _ in self.chunks()]
        last = self.logits.num_sampled - begins[-1] if begins else 0
        tiles = self._tiles_before(begins[-1]) + triton.cdiv(last, self.tiles.logits.columns) if begins else 0
        return self.new(tiles, self.padded_rows)

    def _tiles_before(self, begin: int) -> int:
        return begin // self.chunk_rows * triton.cdiv(self.chunk_rows, self.tiles.logits.columns)

    def _nearest_sub_centres(self, chunk: Chunk) -> Tensor:
        """(G, classes of the chunk), int8: the nearest of each class's sub-centres."""
        tile = self.tiles.logits
        classes = _whole(triton.cdiv(self.padded_chunk, self.logits.sub_centres), tile.columns)
        nearest_GK = self.new(self.padded_rows, classes, dtype=torch.int8)
        device_side.nearest_sub_centres[(self.padded_rows // tile.rows * (classes // tile.columns),)](
            self.features[0], *chunk.operands, chunk.inverse_K, nearest_GK, chunk.size, self.padded_rows, classes,
            SUB_CENTRES=self.logits.sub_centres,
            D_PAD=self.padded_width, BLOCK_G=tile.rows, BLOCK_K=tile.columns, DEPTH=tile.depth, **tile.launch,
        )  # fmt: skip
        return nearest_GK

    def new_splits(self) -> Tensor:
        """(splits, G, D), fp32, 0: as many as keep all multiprocessors busy, each with its share of a chunk."""
        tile = self.tiles.weighted_sum
        programs = self.padded_rows // tile.rows * (self.padded_width // tile.columns)
        splits = max(1, min(self.processors // programs, self.padded_chunk // tile.depth))
        return self.new(splits, self.padded_rows, self.padded_width).zero_()

    def weighted_sum(self, chunk: Chunk, weight_GK: Tensor, splits: Tensor) -> None:
        """Adds weight_GK @ centres, as they are stored."""
        tile = self.tiles.weighted_sum
        programs = self.padded_rows // tile.rows * (self.padded_width // tile.columns)
        share = triton.cdiv(triton.cdiv(chunk.size, tile.depth), len(splits))
        device_side.weighted_sum[(programs, len(splits))](
            weight_GK, *chunk.operands, splits, chunk.size, share, weight_GK.stride(0), self.padded_rows,
            D_PAD=self.padded_width, BLOCK_G=tile.rows, BLOCK_D=tile.columns, DEPTH=tile.depth, **tile.launch,
        )  # fmt: skip

    def add_up(self, by_feature: Tensor, splits: Tensor | None, shift_G: Tensor) -> tuple[Tensor, Tensor | None]:
        """(denominators, weighted sums over them) of all chunks."""
        denominator_G = self.new(self.num_rows, dtype=torch.float64)
        weighted_sum_GD = None if splits is None else self.new(self.num_rows, self.width)
        blocks = row_blocks(self.padded_width)
        device_side.add_up[(triton.cdiv(self.num_rows, blocks["BLOCK_K"]),)](
            by_feature, splits, shift_G, denominator_G, weighted_sum_GD,
            len(by_feature), 0 if splits is None else len(splits), self.num_rows, self.padded_rows,
            **self.widths, TILES=TILES_AT_A_TIME, **blocks,
        )  # fmt: skip
        return denominator_G, weighted_sum_GD

    def pull(self, weight_GK: Tensor, x_GD: Tensor, sum_KD: Tensor) -> None:
        """sum_KD becomes weight_GK^T @ x_GD, features times their factors."""
        tile = self.tiles.gradient
        programs = triton.cdiv(len(sum_KD), tile.rows) * (self.padded_width // tile.columns)
        device_side.pull[(programs,)](
            weight_GK, x_GD, sum_KD, len(sum_KD), weight_GK.stride(0), self.padded_rows,
            **self.widths, BLOCK_K=tile.rows, BLOCK_D=tile.columns, DEPTH=tile.depth, **tile.launch,
        )  # fmt: skip


def _power_of_2(size: int) -> int:
    """The smallest power of 2 that is not less than size, and at least 16, what a product needs."""
    return max(16, triton.next_power_of_2(size))


def _whole(size: int, block: int) -> int:
    """Whole blocks, at least one."""
    return max(1, triton.cdiv(size, block)) * block
