"""The Triton kernel against the plain one in float64.

On a CUDA device, or, with TRITON_INTERPRET=1, on the CPU (tests/unit/kernels/test_triton.py does that).
"""

import math
import os
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from partial_fc.head.kernels import LogitGrad, Logits, Sums, triton, triton_pass
from partial_fc.head.kernels.plain import PlainKernel
from partial_fc.head.kernels.triton import TritonKernel
from partial_fc.head.kernels.triton_pass import Tile, Tiles
from partial_fc.head.margin import Negatives
from tests.unit.kernels.test_cpu_kernel import (
    check_a_centre_that_is_too_long,
    check_nearest,
    dense_cosines,
    exact,
    gradient,
    some_targets,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
on_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device, and TRITON_INTERPRET is not 1"
    ),
]


@dataclass(frozen=True)
class Case:
    features: int = 33
    sampled: int = 300
    width: int = 24
    rows: bool = False  # through row_S, out of twice as many
    storage: torch.dtype = torch.float32
    scale: float = 64.0
    rule: str = "none"
    sub_centres: int = 1
    target_here: bool = True
    labels: int = 1

    def __str__(self) -> str:
        default = Case()
        return ",".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(default, name))


CASES = [
    Case(),
    Case(features=1, sampled=1, target_here=False),
    Case(features=7, sampled=53, width=96, rows=True, storage=torch.bfloat16),
    Case(features=7, sampled=53, width=96, storage=torch.float16),
    Case(features=130, sampled=53, width=40, storage=torch.bfloat16, scale=300.0),
    Case(rows=True, scale=300.0, target_here=False),
    Case(rule="filter", rows=True),
    Case(sub_centres=3, rows=True, storage=torch.bfloat16),
    Case(sub_centres=3, sampled=51, rule="filter", scale=300.0),
    Case(labels=8, rows=True, storage=torch.bfloat16),
    Case(labels=3, sub_centres=3, rule="filter", features=70),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def problem(case: Case) -> tuple[Logits, LogitGrad]:
    """Features and centres at random, some of them of length 0; some near each other, so that the rules apply."""
    generator = torch.Generator().manual_seed(7)
    randn = partial(torch.randn, generator=generator)
    G, S, D = case.features, case.sampled, case.width
    L = 2 * S if case.rows else S
    row_S = torch.randperm(L, generator=generator)[:S].sort().values if case.rows else None
    centre_LD = randn(L, D) * 10 ** randn(L, 1)
    target_G = torch.randint(-S // 2, S, (G,), generator=generator).clamp(min=-1)
    if case.labels > 1:
        target_G = some_targets(G, S, case.sub_centres, case.labels, generator)
    if not case.target_here:
        target_G.fill_(-1)
    feat_GD = randn(G, D)
    near = torch.randint(0, L, (G,), generator=generator)
    feat_GD[::2] += 2.0 * torch.nn.functional.normalize(centre_LD[near])[::2] * feat_GD[::2].norm(dim=1)[:, None]
    if G > 2:
        feat_GD[1] = 0.0
        centre_LD[::7] = 0.0
    negatives = Negatives(filter_above=0.3 if case.rule == "filter" else None)
    logits = Logits(
        torch.nn.functional.normalize(feat_GD).to(DEVICE),
        centre_LD.to(case.storage).to(DEVICE),
        None if row_S is None else row_S.to(DEVICE),
        target_G.to(DEVICE),
        case.scale,
        negatives,
        case.sub_centres,
    )
    # As in a step: factor * exp(logit) is a share of the softmax, times scale / G.
    denominator_G = exact_sums(logits).denominator_G
    factor_G = torch.where(denominator_G > 0, case.scale / G / denominator_G, 0.0)
    factor_G[::5] = 0.0
    target_grad_G = -torch.rand(target_G.shape, generator=generator).to(DEVICE) * case.scale / G
    return logits, LogitGrad(factor_G, target_grad_G)


def lengths(logits: Logits) -> Tensor:
    """Of the sampled centres (S, 1)."""
    centre_LD = logits.centre_LD.double()
    return (centre_LD if logits.row_S is None else centre_LD[logits.row_S]).norm(dim=1, keepdim=True)


def exact_sums(logits: Logits) -> Sums:
    return PlainKernel().sums(exact(logits))


def exact_gradient(logits: Logits, logit_grad: LogitGrad) -> Tensor:
    wide = replace(logit_grad, target_grad_G=logit_grad.target_grad_G.double())
    return gradient(PlainKernel(), exact(logits), wide)


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, over the whole tensor."""
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@each_case
def test_fp32_products_give_the_definition(case):
    logits, logit_grad = problem(case)
    kernel = TritonKernel("fp32")
    sums, wanted = (make(logits) for make in (kernel.sums, exact_sums))
    close = 4e-7 * case.scale  # a cosine is right to a few 1e-8, and is multiplied by the scale
    assert sums.denominator_G.dtype == torch.float64
    torch.testing.assert_close(sums.denominator_G, wanted.denominator_G, rtol=close, atol=0.0)
    assert error(sums.weighted_sum_GD, wanted.weighted_sum_GD) < close

    grad_SD = gradient(kernel, logits, logit_grad)
    # By unit centre: those of the shortest centres would hide all others.
    length = lengths(logits)
    assert error(grad_SD * length, exact_gradient(logits, logit_grad) * length) < close


def with_bf16_operands(logits: Logits) -> Logits:
    """Features and unit centres rounded, for the plain kernel to compute exactly with."""
    hat_LD = torch.nn.functional.normalize(logits.centre_LD.double())
    unit_GD, hat_LD = (x.float().bfloat16().double() for x in (logits.unit_GD, hat_LD))
    return replace(logits, unit_GD=unit_GD, centre_LD=hat_LD)


# The rules have steps, where a rounded cosine may fall to the other side: no bound there.
@pytest.mark.parametrize("case", [c for c in CASES if c.rule == "none" and c.sampled > 1], ids=str)
def test_bf16_products_err_at_most_twice_as_much_as_operands_rounded_once(case):
    """Weights are rounded, too, before the second product."""
    logits, logit_grad = problem(replace(case, features=130))  # enough rows for errors to be alike on average
    kernel, low = TritonKernel("bf16"), with_bf16_operands(logits)
    three = []
    for sums, grad_SD, length in (
        (kernel.sums(logits), gradient(kernel, logits, logit_grad), lengths(logits)),
        (exact_sums(low), exact_gradient(low, logit_grad), lengths(low)),
        (exact_sums(logits), exact_gradient(logits, logit_grad), lengths(logits)),
    ):
        # Logarithms: of numbers that are e^300 apart a norm sees the largest alone.
        three.append((sums.denominator_G.log(), sums.weighted_sum_GD, grad_SD * length))
    # A row that one class dominates: its weight is 1, exact there, and any number with rounding in ours.
    more = {"denominator": 1e-6, "weighted sum": 2.0**-9, "gradient": 1e-6}
    for name, got, rounded, wanted in zip(more, *three, strict=True):
        assert error(got, wanted) <= 2 * error(rounded, wanted) + more[name], name
        assert error(got, wanted) > 1e-7, f"{name}: these products were not in bf16"


# Chunks and products have nothing to do with each other: each precision once is enough, and three cases.
@pytest.mark.parametrize(("case", "precision"), [(CASES[4], "bf16"), (CASES[7], "fp32"), (CASES[9], "bf16")], ids=str)
def test_chunks_change_nothing_and_runs_repeat(case, precision, monkeypatch):
    logits, logit_grad = problem(case)
    kernel = TritonKernel(precision)
    whole, grad = kernel.sums(logits), gradient(kernel, logits, logit_grad)
    again = kernel.sums(logits)
    assert torch.equal(whole.denominator_G, again.denominator_G)
    assert torch.equal(whole.weighted_sum_GD, again.weighted_sum_GD)
    assert torch.equal(grad, gradient(kernel, logits, logit_grad))

    monkeypatch.setattr(triton_pass, "CHUNK_ROWS", 48)
    assert len(list(kernel.centre_gradients(logits, logit_grad))) > 1
    parts = kernel.sums(logits)
    torch.testing.assert_close(parts.denominator_G, whole.denominator_G, rtol=4e-7 * case.scale, atol=0.0)
    torch.testing.assert_close(parts.weighted_sum_GD, whole.weighted_sum_GD, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(kernel, logits, logit_grad), grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[8]], ids=str)
def test_programs_that_stay_for_all_tiles_change_no_bit(case):
    """Fewer programs than tiles, of fewer places than a tile and of more, with and without copies of the centres."""
    logits, _ = problem(case)
    tile = Tile(32, 64, 64, 4, 1)
    found = []
    for resident in (0, 1):
        logit_tile = replace(tile, resident=resident)
        found.append(TritonKernel("bf16", Tiles(logit_tile, logit_tile, tile, tile)).sums(logits, num_nearest=3))
    assert torch.equal(found[0].denominator_G, found[1].denominator_G)
    assert torch.equal(found[0].weighted_sum_GD, found[1].weighted_sum_GD)
    assert torch.equal(found[0].nearest.cosine_GK, found[1].nearest.cosine_GK)


@pytest.mark.parametrize("scale", [64.0, 300.0])
def test_what_the_first_pass_leaves_to_the_second_changes_no_bit(scale, monkeypatch):
    """Room for all, for one chunk of three, for none, and after another pass has taken it."""
    monkeypatch.setattr(triton_pass, "CHUNK_ROWS", 48)
    logits, logit_grad = problem(Case(features=7, sampled=101, width=40, rows=True, rule="hard", scale=scale))
    kernel = TritonKernel("bf16")
    anew = gradient(kernel, logits, logit_grad)
    padded = kernel._pass(logits).padded_rows
    for places in (200, 50, 0):
        monkeypatch.setattr(triton, "EXP_CACHE_BYTES", 2 * padded * (places + triton.SPARE))
        cache = kernel.sums(logits).cache
        assert cache.places == {200: 101, 50: 48, 0: 0}[places]
        assert_same(gradient(kernel, logits, replace(logit_grad, cache=cache)), anew)
    monkeypatch.undo()
    first = kernel.sums(logits).cache
    launched = counted(monkeypatch, "weigh")
    assert_same(gradient(kernel, logits, replace(logit_grad, cache=first)), anew)
    assert not launched
    kernel.sums(replace(logits, scale=3.0))
    assert_same(gradient(kernel, logits, replace(logit_grad, cache=first)), anew)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit on a device. The interpreter's products are those of numpy's BLAS, whose sums depend on the shape of a
    tile: an exponential may then be rounded to the next bfloat16."""
    if torch.cuda.is_available():
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9 * expected.abs().max().item())


def counted(monkeypatch, name: str) -> list[str]:
    """Gets the name of this part of a pass each time that it runs."""
    runs, part = [], getattr(triton_pass.Pass, name)

    def run(*args, **named):
        runs.append(name)
        return part(*args, **named)

    monkeypatch.setattr(triton_pass.Pass, name, run)
    return runs


def test_gradients_are_at_right_angles_to_their_centres():
    logits, logit_grad = problem(Case(features=40, storage=torch.bfloat16))
    grad_SD = gradient(TritonKernel("bf16"), logits, logit_grad)
    centre_SD = logits.centre_LD.double()
    cos = torch.nn.functional.cosine_similarity(grad_SD.double(), centre_SD, eps=1e-300)
    assert cos.abs().max() < 1e-5


def test_a_centre_too_long_for_float32_is_not_hidden():
    check_a_centre_that_is_too_long(TritonKernel("bf16"), *problem(Case(features=7, sampled=53)))


def test_the_filter_errs_with_bf16_operands_by_their_rounding_alone():
    """At scale 0, nearly, a denominator counts the classes that are left in. Both operands are off by 2^-9 of
    themselves at most, and so a cosine by 2^-8."""
    logits, _ = problem(Case(features=40, width=40, scale=1e-6, target_here=False))
    found, threshold = [], 0.3
    for kernel, at in (
        (TritonKernel("bf16"), threshold),
        *((PlainKernel(), threshold + more) for more in (-(2.0**-8), 0.0, 2.0**-8)),
    ):
        found.append(kernel.sums(replace(logits, negatives=Negatives(filter_above=at))).denominator_G.round())
    ours, fewest, exact, most = found
    assert (fewest <= ours).all()
    assert (ours <= most).all()
    assert (fewest < most).any()
    assert (ours != exact).sum() < len(exact) / 2


@pytest.mark.parametrize(
    "case", [Case(sampled=64), Case(sampled=64, scale=300.0), Case(features=3, sampled=1)], ids=str
)
def test_where_everything_is_left_out_there_is_nothing(case):
    """By the filter; or the only class is the rows' own."""
    logits, logit_grad = problem(case)
    if case.sampled == 1:
        target_G = torch.zeros_like(logits.target_G)
        logits = replace(logits, target_G=target_G, centre_LD=torch.ones_like(logits.centre_LD))
    else:
        logits = replace(logits, negatives=Negatives(filter_above=-1.5))
    sums = TritonKernel("bf16").sums(logits)
    assert sums.denominator_G.count_nonzero() == 0
    assert sums.weighted_sum_GD.count_nonzero() == 0
    grad_SD = gradient(TritonKernel("fp32"), logits, logit_grad)
    assert error(grad_SD, exact_gradient(logits, logit_grad)) < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("multiplied", [1.0, 65_536.0])
def test_a_feature_opposite_to_all_centres_pushes_as_hard_as_it_should(precision, multiplied):
    """Collapsed classes: exponentials are as small as they can be, and their factor beyond what float32 holds."""
    generator = torch.Generator().manual_seed(2)
    direction_D = torch.nn.functional.normalize(torch.randn(16, generator=generator), dim=0)
    centre_LD = (0.3 * (direction_D + 0.002 * torch.randn(2, 16, generator=generator))).to(DEVICE)
    unit_GD = torch.nn.functional.normalize(-direction_D + 0.002 * torch.randn(3, 16, generator=generator))
    target_G = torch.tensor([-1, -1, 0], device=DEVICE)
    logits = Logits(unit_GD.to(DEVICE), centre_LD, None, target_G, 64.0, Negatives())
    denominator_G = exact_sums(logits).denominator_G
    factor_G = multiplied * 64.0 / 3 / denominator_G
    assert (factor_G * math.exp(64.0 - triton.TOP_EXPONENT) > 2.0**120).all()  # where it was cut off once
    logit_grad = LogitGrad(factor_G, torch.zeros(3, device=DEVICE))
    exact_SD = exact_gradient(logits, logit_grad)
    assert exact_SD.norm() > multiplied
    found_SD = gradient(TritonKernel(precision), logits, logit_grad)
    assert error(found_SD, exact_SD) < {"fp32": 1e-4, "bf16": 0.2}[precision]


def test_a_shard_without_classes():
    logits, logit_grad = problem(Case(features=3, sampled=4))
    logits = replace(
        logits, row_S=torch.zeros(0, dtype=torch.int64, device=DEVICE), target_G=-torch.ones_like(logits.target_G)
    )
    sums = TritonKernel("bf16").sums(logits)
    assert sums.denominator_G.count_nonzero() == 0
    assert sums.weighted_sum_GD.count_nonzero() == 0
    assert list(TritonKernel("bf16").centre_gradients(logits, logit_grad)) == []


@pytest.mark.parametrize(
    ("case", "k"),
    [
        (Case(features=1, sampled=1, target_here=False), 1),
        (Case(features=9, rows=True, storage=torch.bfloat16, rule="filter"), 9),
        (Case(features=7, sampled=306, sub_centres=3, rule="filter"), 9),
        (Case(features=7, sampled=180, sub_centres=20, storage=torch.float16), 3),
    ],
    ids=str,
)
def test_the_nearest_classes_are_those_of_the_dense_product(case, k, monkeypatch):
    """Alone in float32, and in the first pass with its products; the pass keeps its bits. In two chunks and a rest,
    candidates of a row or two at a time."""
    monkeypatch.setattr(triton_pass, "CHUNK_ROWS", 128)
    monkeypatch.setattr(triton_pass, "CANDIDATE_BYTES", 60 * 1024)
    logits, _ = problem(case)
    for precision in ("fp32", "bf16"):
        kernel = TritonKernel(precision)
        alone, sums = kernel.sums(logits), kernel.sums(logits, num_nearest=k)
        assert torch.equal(sums.denominator_G, alone.denominator_G)
        assert torch.equal(sums.weighted_sum_GD, alone.weighted_sum_GD)
        for found, operands in ((kernel.nearest(logits, k), torch.float32), (sums.nearest, kernel.operands)):
            check_nearest(found, dense_cosines(logits, operands), 1e-6)


def test_the_nearest_of_few_or_equal_or_nan_centres():
    """Of equal cosines in several blocks each class comes once; NaN is first; -1 where there is none."""
    unit_GD = torch.eye(2, device=DEVICE)
    centre_LD = torch.tensor([[1.0, 0.0]], device=DEVICE).repeat(40, 1)
    centre_LD[39] = torch.tensor([0.0, 1.0])

    def nearest(centre_LD: Tensor, k: int):
        logits = Logits(unit_GD, centre_LD, None, torch.tensor([-1, -1], device=DEVICE), 1.0, Negatives())
        return TritonKernel("fp32").nearest(logits, k)

    found = nearest(centre_LD, 42)
    assert found.cosine_GK.tolist() == [[1.0] * 39 + [0.0] + [-math.inf] * 2, [1.0] + [0.0] * 39 + [-math.inf] * 2]
    assert [sorted(row) for row in found.class_GK.tolist()] == [[-1, -1, *range(40)]] * 2
    assert found.class_GK[:, -2:].tolist() == [[-1, -1]] * 2
    assert found.class_GK[1, 0] == 39
    assert nearest(centre_LD[:0], 1).class_GK.tolist() == [[-1], [-1]]
    centre_LD[17, 0] = torch.nan
    found = nearest(centre_LD, 2)
    assert found.cosine_GK.isnan().tolist() == [[True, False]] * 2
    assert found.class_GK[:, 0].tolist() == [17, 17]


def test_what_it_cannot_do_it_refuses():
    logits, logit_grad = problem(Case(features=3, sampled=4))
    with pytest.raises(ValueError, match=r"float64; .* use impl 'plain'"):
        TritonKernel("fp32").sums(replace(logits, unit_GD=logits.unit_GD.double()))
    with pytest.raises(ValueError, match="expected the same device and rows without gaps"):
        next(TritonKernel("fp32").centre_gradients(replace(logits, centre_LD=logits.centre_LD.T), logit_grad))


def random_step(G: int, S: int, D: int) -> tuple[Logits, LogitGrad]:
    """On the GPU, S of 2 * S centres, too large for the dense definition."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    unit_GD = torch.nn.functional.normalize(torch.randn(G, D, generator=generator, device=DEVICE))
    centre_LD = torch.randn(2 * S, D, generator=generator, device=DEVICE).mul_(0.01).bfloat16()
    row_S = torch.arange(0, 2 * S, 2, device=DEVICE)
    target_G = torch.randint(0, S, (G,), generator=generator, device=DEVICE)
    logits = Logits(unit_GD, centre_LD, row_S, target_G, 64.0, Negatives())
    factor_G = 64.0 / G / PlainKernel().sums(logits, with_weighted_sum=False).denominator_G
    return logits, LogitGrad(factor_G, torch.full((G,), -64.0 / G, device=DEVICE))


@on_gpu
@pytest.mark.parametrize(("G", "S", "D"), [(1024, 200_000, 512), (333, 70_001, 384), (4096, 66_000, 512)])
@pytest.mark.parametrize(("precision", "close"), [("bf16", 1e-2), ("fp32", 1e-4)])
def test_many_classes_like_the_plain_kernel(G, S, D, precision, close):
    logits, logit_grad = random_step(G, S, D)
    kernel, plain = TritonKernel(precision), PlainKernel()
    ours, expected = kernel.sums(logits), plain.sums(logits)
    assert error(ours.denominator_G, expected.denominator_G) < close
    assert error(ours.weighted_sum_GD, expected.weighted_sum_GD.double()) < close
    ours, expected = gradient(kernel, logits, logit_grad), gradient(plain, logits, logit_grad)
    assert error(ours, expected.double()) < close
    assert torch.equal(ours, gradient(kernel, logits, logit_grad))


@on_gpu
@pytest.mark.parametrize("S", [100_000, 1_000_000])
def test_memory_beyond_the_centres_does_not_grow_with_the_classes(S, monkeypatch):
    monkeypatch.setattr(triton, "EXP_CACHE_BYTES", 1 << 27)
    logits, logit_grad = random_step(1024, S, 512)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    TritonKernel("bf16").sums(logits)
    for _ in TritonKernel("bf16").centre_gradients(logits, logit_grad):
        pass
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
