"""Device functions of triton.py. Each works on one chunk of K places of row_S, on tiles of (features, places).

Letters: G features, padded to tiles; K places of a chunk, numbered from 0; `begin` is the first one's number in row_S.
Padded features are 0; places past the end have inverse length 0, so their cosines are 0 and what is left out is said
by masks. Products have operands of x_GD's dtype and fp32 sums; everything between two products is fp32.
"""

import math

import triton
import triton.language as tl

# The interpreter multiplies the bits of bf16 numbers instead of the numbers, and cuts where a GPU rounds.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

SMALLEST = tl.constexpr(2.0**-126)
LOG2_E = tl.constexpr(math.log2(math.e))

# What `weigh` finds.
MOST = tl.constexpr(0)
SUMS = tl.constexpr(1)

BLOCK = tl.constexpr(16)  # places of which `weigh` finds the largest cosine

# The features of the gradient's product, times their factors, are so much smaller than they should be: a factor can be
# 2 ** 132, with weights of 2 ** -125, and a loss multiplied by 65,536 comes on top. `finish_rows` makes up for it. From
# 2 ** 152 on the gradient is not finite, which guards see.
SHRUNK = tl.constexpr(2.0**-24)


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """fp32 -> the dtype of the products' operands, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _rows(row_ptr, place_K, K):
    """Rows of the centres at these places; past the end, that of the last place."""
    place_K = tl.minimum(place_K, K - 1)
    if row_ptr is None:
        return place_K.to(tl.int64)
    else:
        return tl.load(row_ptr + place_K)


@triton.jit
def _centres(centre_ptr, row_K, stride, d, D: tl.constexpr, D_PAD: tl.constexpr):
    """(places, d) of the centres as they are stored; 0 past their width."""
    at = centre_ptr + row_K[:, None] * stride + d[None, :]
    if D == D_PAD:
        return tl.load(at)
    else:
        return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def _operand(stored, dtype: tl.constexpr):
    if stored.dtype == dtype:
        return stored
    else:
        return _narrow(stored.to(tl.float32), dtype)


@triton.jit
def _products(
    x_ptr, g, operand_ptr, place_K, stride, D_PAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """(BLOCK_G, BLOCK_K): features by centres."""
    total = tl.zeros((BLOCK_G, BLOCK_K), dtype=tl.float32)
    for first in range(0, D_PAD, DEPTH):
        d = first + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + g[:, None] * D_PAD + d[None, :])
        centre = tl.load(operand_ptr + place_K[:, None] * stride + d[None, :])
        total = _dot(x, tl.trans(centre), total)
    return total


@triton.jit
def _described_products(
    x, first_g, operand, first_place, D_PAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The same of tensor descriptors, whose tiles the copy engine brings; rows past the last are 0."""
    total = tl.zeros((BLOCK_G, BLOCK_K), dtype=tl.float32)
    for first in range(0, D_PAD, DEPTH):
        total = _dot(x.load([first_g, first]), tl.trans(operand.load([first_place, first])), total)
    return total


@triton.jit(do_not_specialize=["G"])
def read_features(
    x_ptr, factor_ptr, shift_ptr, target_ptr, operand_ptr, target_class_ptr, G, G_PAD,
    LABELS: tl.constexpr, SUB_CENTRES: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """operand (G, D), padded: the features in its dtype or, with factor, times factor * 2 ** shift * SHRUNK.
    target_class: the number of the target's class among those that take part, -1: elsewhere; of LABELS targets of each
    feature, (LABELS, G), padded."""
    g = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    there = g < G
    x = tl.load(x_ptr + g[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    if factor_ptr is not None:
        shift = tl.load(shift_ptr + g, mask=there, other=0.0).to(tl.float64)
        factor = tl.load(factor_ptr + g, mask=there, other=0.0) * tl.exp2(shift) * SHRUNK
        x *= factor.to(tl.float32)[:, None]
    padded = (g < G_PAD)[:, None] & (d < D_PAD)[None, :]
    tl.store(operand_ptr + g[:, None] * D_PAD + d[None, :], _narrow(x, operand_ptr.dtype.element_ty), mask=padded)
    if target_ptr is not None:
        for label in range(LABELS):
            target = tl.load(target_ptr + g * LABELS + label, mask=there, other=-1)
            target_class = tl.where(target < 0, -1, target // SUB_CENTRES).to(tl.int32)
            tl.store(target_class_ptr + label * G_PAD + g, target_class, mask=g < G_PAD)


@triton.jit(do_not_specialize=["G", "num_tiles", "num_splits"])
def add_up(
    by_feature_ptr, splits_ptr, shift_ptr, denominator_ptr, weighted_sum_ptr, num_tiles, num_splits, G, G_PAD,
    D: tl.constexpr, D_PAD: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What a pass has found, of all tiles and all splits: denominators, float64, and the weighted sums over them."""
    g = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = g < G
    total = tl.zeros((BLOCK_K,), tl.float64)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        mask = (tile < num_tiles)[:, None] & there[None, :]
        part = tl.load(by_feature_ptr + tile[:, None].to(tl.int64) * G_PAD + g[None, :], mask=mask, other=0.0)
        total += tl.sum(part.to(tl.float64), axis=0)
    shift = tl.load(shift_ptr + g, mask=there, other=0.0).to(tl.float64)
    tl.store(denominator_ptr + g, total * tl.exp2(shift), mask=there)
    if splits_ptr is not None:
        d = tl.arange(0, BLOCK_D)
        mask = there[:, None] & (d < D)[None, :]
        weighted_sum = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        for split in range(0, num_splits):
            at = (g + split * G_PAD)[:, None] * D_PAD + d[None, :]
            weighted_sum += tl.load(splits_ptr + at, mask=mask, other=0.0)
        divisor = tl.where(total == 0.0, 1.0, total).to(tl.float32)
        weighted_sum = tl.div_rn(weighted_sum, divisor[:, None] + tl.zeros_like(weighted_sum))
        tl.store(weighted_sum_ptr + g[:, None] * D + d[None, :], weighted_sum, mask=mask)


@triton.jit(do_not_specialize=["K"])
def read_centres(
    centre_ptr, row_ptr, stride, operand_ptr, inverse_ptr, K,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """1 / length of each centre, 0 past the end and where its square is 0 or has too few digits, below the normal;
    NaN where it is beyond fp32: 0 would hide it. With operand (K, D_PAD), also the centres one after the other in its
    dtype, as the products read them."""
    place = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = _rows(row_ptr, place, K)
    square = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for first in range(0, D_PAD, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        centre = _centres(centre_ptr, row, stride, d, D, D_PAD)
        if operand_ptr is not None:
            tl.store(operand_ptr + place[:, None] * D_PAD + d[None, :], _operand(centre, operand_ptr.dtype.element_ty))
        square += tl.sum(centre.to(tl.float32) * centre.to(tl.float32), axis=1)
    there = (square >= SMALLEST) & (place < K)
    inverse = tl.where(there, 1.0 / tl.sqrt(tl.where(there, square, 1.0)), 0.0)
    inverse = tl.where((square < float("inf")) | (place >= K), inverse, float("nan"))
    tl.store(inverse_ptr + place, inverse)


@triton.jit(do_not_specialize=["K"])
def nearest_sub_centres(
    x_ptr, operand_ptr, stride, inverse_ptr, nearest_ptr, K, G_PAD, CLASSES_PAD,
    SUB_CENTRES: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """nearest (G, classes), int8: which of its sub-centres is nearest to the feature; the first of equals."""
    num_g = G_PAD // BLOCK_G
    g = tl.program_id(0) % num_g * BLOCK_G + tl.arange(0, BLOCK_G)
    class_K = tl.program_id(0) // num_g * BLOCK_K + tl.arange(0, BLOCK_K)
    most = tl.full((BLOCK_G, BLOCK_K), float("-inf"), dtype=tl.float32)
    nearest = tl.zeros((BLOCK_G, BLOCK_K), dtype=tl.int8)
    for sub in range(SUB_CENTRES):
        place = class_K * SUB_CENTRES + sub
        inverse = tl.load(inverse_ptr + place, mask=place < K, other=0.0)
        at = tl.minimum(place, K - 1)
        cos = _products(x_ptr, g, operand_ptr, at, stride, D_PAD, BLOCK_G, BLOCK_K, DEPTH) * inverse[None, :]
        nearest = tl.where(cos > most, sub, nearest).to(tl.int8)
        most = tl.maximum(most, cos)
    tl.store(nearest_ptr + g[:, None] * CLASSES_PAD + class_K[None, :], nearest)


@triton.jit(do_not_specialize=["K", "begin"])
def weigh(
    x_ptr, operand_ptr, stride, inverse_ptr, nearest_ptr,
    target_class_ptr, shift_ptr, weight_ptr, by_feature_ptr, largest_ptr,
    K, begin, K_PAD, G_PAD, CLASSES_PAD, BLOCKS_PAD, scale, filter_above,
    WHAT: tl.constexpr, FILTERED: tl.constexpr, LABELS: tl.constexpr, SUB_CENTRES: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """The logits of a tile, times log2(e) as scale and shift are too, and what is left of them:

    MOST    by_feature (tiles of places, G): the largest logit.
    SUMS    by_feature: the sum of e = 2 ** (logit - shift); weight (G, K), if given: e / length, what the stored
            centre weighs in the feature's weighted sum, and, times the feature's factor, the feature in the gradient
            by the stored centre.

    largest (G, blocks), if given: the largest cosine of each BLOCK places, targets and sub-centres included, Inf where
    one is NaN.

    Features are the tile's rows since most numbers belong to one: a thread holds two rows, but 64 columns. A number
    costs a multiply-add and a power of 2; what only few tiles have to test is tested by tile.

    RESIDENT: programs stay, x and operands are descriptors, and the next tile comes while one is finished. Else each
    has one tile.
    """
    num_g = G_PAD // BLOCK_G
    for tile in tl.range(tl.program_id(0), num_g * tl.cdiv(K, BLOCK_K), tl.num_programs(0), flatten=RESIDENT):
        tile_g = tile % num_g  # programs that run together share their centres: these come from memory once
        tile_k = tile // num_g
        g = tile_g * BLOCK_G + tl.arange(0, BLOCK_G)
        place = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        if RESIDENT:
            product = _described_products(
                x_ptr, tile_g * BLOCK_G, operand_ptr, tile_k * BLOCK_K, D_PAD, BLOCK_G, BLOCK_K, DEPTH
            )
        else:
            at = tl.minimum(place, K - 1)
            product = _products(x_ptr, g, operand_ptr, at, stride, D_PAD, BLOCK_G, BLOCK_K, DEPTH)
        inverse = tl.load(inverse_ptr + place)
        if largest_ptr is not None:
            cos = tl.where((place < K)[None, :], product * inverse[None, :], float("-inf"))
            cos = tl.where(cos == cos, cos, float("inf"))
            block = tile_k * (BLOCK_K // BLOCK) + tl.arange(0, BLOCK_K // BLOCK)
            largest = tl.max(tl.reshape(cos, (BLOCK_G, BLOCK_K // BLOCK, BLOCK)), axis=2)
            tl.store(largest_ptr + g[:, None] * BLOCKS_PAD + block[None, :], largest)
        shift = tl.load(shift_ptr + g)[:, None]
        logit = product * (inverse * scale)[None, :] - shift
        if FILTERED:
            logit = tl.where(product * inverse[None, :] > filter_above, float("-inf"), logit)
        if nearest_ptr is not None:
            chosen = tl.load(nearest_ptr + g[:, None] * CLASSES_PAD + (place // SUB_CENTRES)[None, :])
            logit = tl.where(chosen == (place % SUB_CENTRES)[None, :], logit, float("-inf"))
        target_class = tl.load(target_class_ptr + g)
        first = begin + tile_k * BLOCK_K
        own = (target_class >= first // SUB_CENTRES) & (target_class <= (first + BLOCK_K - 1) // SUB_CENTRES)
        if (tl.max(own.to(tl.int32), axis=0) > 0) | ((tile_k + 1) * BLOCK_K > K):
            left_out = ((place + begin) // SUB_CENTRES)[None, :] == target_class[:, None]
            logit = tl.where(left_out | (place >= K)[None, :], float("-inf"), logit)
        if LABELS > 1:
            for label in range(1, LABELS):
                target_class = tl.load(target_class_ptr + label * G_PAD + g)
                own = (target_class >= first // SUB_CENTRES) & (target_class <= (first + BLOCK_K - 1) // SUB_CENTRES)
                if tl.max(own.to(tl.int32), axis=0) > 0:
                    left_out = ((place + begin) // SUB_CENTRES)[None, :] == target_class[:, None]
                    logit = tl.where(left_out, float("-inf"), logit)

        if WHAT == MOST:
            tl.store(by_feature_ptr + tile_k * G_PAD + g, tl.max(logit, axis=1))
        else:
            weight = tl.exp2(logit)
            if by_feature_ptr is not None:
                tl.store(by_feature_ptr + tile_k * G_PAD + g, tl.sum(weight, axis=1))
            if weight_ptr is not None:
                weight *= inverse[None, :]
                stored = _narrow(weight, weight_ptr.dtype.element_ty)
                tl.store(weight_ptr + g[:, None] * K_PAD + place[None, :], stored)


@triton.jit(do_not_specialize=["K", "share"])
def weighted_sum(
    weight_ptr, operand_ptr, stride, weighted_sum_ptr, K, share, K_PAD, G_PAD,
    D_PAD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Adds weight @ centres of `share` blocks of DEPTH places to this split's (G, D): no two programs write to one
    number, so the result repeats."""
    num_d = D_PAD // BLOCK_D
    g = tl.program_id(0) // num_d * BLOCK_G + tl.arange(0, BLOCK_G)
    d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(1)
    at = weighted_sum_ptr + split.to(tl.int64) * G_PAD * D_PAD + g[:, None] * D_PAD + d[None, :]
    total = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    end = tl.minimum((split + 1) * share, tl.cdiv(K, DEPTH))
    for block in range(split * share, end):
        place = block * DEPTH + tl.arange(0, DEPTH)
        weight = tl.load(weight_ptr + g[:, None] * K_PAD + place[None, :])
        centre = tl.load(operand_ptr + tl.minimum(place, K - 1)[:, None] * stride + d[None, :])
        total = _dot(weight, centre, total)
    tl.atomic_add(at, total, sem="relaxed")


@triton.jit(do_not_specialize=["K"])
def pull(
    weight_ptr, x_ptr, sum_ptr, K, K_PAD, G_PAD,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """sum (K, D): weight^T @ x."""
    num_d = D_PAD // BLOCK_D
    place = tl.program_id(0) // num_d * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_K, BLOCK_D), dtype=tl.float32)
    for first in range(0, G_PAD, DEPTH):
        g = first + tl.arange(0, DEPTH)
        weight = tl.load(weight_ptr + g[:, None] * K_PAD + place[None, :])
        total = _dot(tl.trans(weight), tl.load(x_ptr + g[:, None] * D_PAD + d[None, :]), total)
    tl.store(sum_ptr + place[:, None] * D + d[None, :], total, mask=(place < K)[:, None] & (d < D)[None, :])


# ---- of the kernels that change rows of tables where they lie: triton_update.py, triton_catch_up.py

# What `finish_rows` does with the gradient. NONE: it is the result.
NONE = tl.constexpr(0)
SGD = tl.constexpr(1)
ADAMW = tl.constexpr(2)
ROW_ADAGRAD = tl.constexpr(3)


@triton.jit
def _hash32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def write(table_ptr, at, mask, x, number_K, d, key):
    """x to its table, in the table's dtype; bfloat16 is rounded with the noise of this row and column."""
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    if dtype == tl.bfloat16:
        low = (number_K & 0xFFFFFFFF).to(tl.uint32)
        row_key = _hash32(_hash32(low + key.to(tl.uint32, bitcast=True)) ^ (number_K >> 32).to(tl.uint32))
        pair = _hash32(row_key[:, None] + (d >> 1).to(tl.uint32)[None, :])
        noise = tl.where((d & 1)[None, :] == 1, pair >> 16, pair & 0xFFFF)
        bits = x.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, bits + noise, bits)
        tl.store(table_ptr + at, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(table_ptr + at, x.to(dtype), mask=mask)


@triton.jit
def correction(num_K, LOG_BETA: tl.constexpr):
    """1 - beta ** num; in float64, as it has four digits left in float32."""
    log_beta = tl.full(num_K.shape, LOG_BETA, tl.float64)
    return (1.0 - tl.exp(num_K.to(tl.float64) * log_beta)).to(tl.float32)


def row_blocks(width: int) -> dict[str, int]:
    """BLOCK_K, BLOCK_D and num_warps: whole rows, 16 numbers of each table to a thread."""
    columns = max(16, triton.next_power_of_2(width))
    rows = max(1, 2048 // columns)
    if INTERPRETED.value:
        rows = 64  # few programs: each takes the interpreter milliseconds
    return {"BLOCK_K": rows, "BLOCK_D": columns, "num_warps": max(4, min(32, columns // 512))}


def signed(key: int) -> int:
    """The same 32 bits as an int32: a launch's integers beyond that are of another type, which compiles anew."""
    return key - (1 << 32) if key >= 1 << 31 else key


def log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
