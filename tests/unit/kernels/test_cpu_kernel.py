"""The C++ kernel, in every variant that this processor runs, against the plain one in float64."""

import ctypes
import warnings
from dataclasses import dataclass, replace

import pytest
import torch

from partial_fc.head.kernels import LogitGrad, Logits, cpu
from partial_fc.head.kernels.choice import auto_precision
from partial_fc.head.kernels.cpu import CpuKernel
from partial_fc.head.kernels.nearest import Nearest
from partial_fc.head.kernels.plain import PlainKernel
from partial_fc.head.kernels.unit import unit
from partial_fc.head.margin import Negatives
from partial_fc.head.native.build import VARIANTS, runnable
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD, RowTable, Storage

pytestmark = pytest.mark.slow

RUNNABLE = runnable()


@dataclass
class Case:
    """Sizes that divide by nothing in the kernel, unless said otherwise."""

    name: str
    G: int = 7
    L: int = 101
    S: int | None = 50  # None: all
    D: int = 25
    dtype: torch.dtype = torch.float32
    scale: float = 64.0
    sub_centres: int = 1
    filter_above: float | None = None
    labels: int = 1

    def __str__(self) -> str:
        return self.name

    def logits(self) -> Logits:
        torch.manual_seed(0)
        k = self.sub_centres
        feat_GD = torch.randn(self.G, self.D)
        centre_LD = torch.randn(self.L * k, self.D) * 0.3
        centre_LD[2 % self.L] = 0  # no length: cosine 0 with everything
        if self.G > 2:
            feat_GD[1] = 0
        row_S = None
        if self.S is not None:
            classes = torch.randperm(self.L)[: self.S].sort().values
            row_S = (classes[:, None] * k + torch.arange(k)).flatten()
        num_sampled = self.L * k if row_S is None else len(row_S)
        target_G = torch.randint(0, num_sampled, (self.G,))
        if self.labels > 1:
            target_G = some_targets(self.G, num_sampled, k, self.labels)
        target_G[1::2] = -1
        negatives = Negatives(self.filter_above)
        unit_GD = unit(feat_GD)[0]
        return Logits(unit_GD, centre_LD.to(self.dtype), row_S, target_G, self.scale, negatives, k)


def some_targets(num_rows: int, num_sampled: int, sub_centres: int, labels: int, generator=None) -> torch.Tensor:
    """Of each row places of `labels` different classes, of which some are not there: (G, T)."""
    random = torch.rand(num_rows, num_sampled // sub_centres, generator=generator)
    place_GT = random.argsort(1)[:, :labels] * sub_centres
    place_GT += torch.randint(0, sub_centres, place_GT.shape, generator=generator)
    return place_GT.masked_fill(torch.rand(place_GT.shape, generator=generator) < 0.3, -1)


CASES = [
    Case("sampled"),
    Case("all", S=None, L=303, G=33),
    Case("one of each", G=1, L=1, S=None, D=1),
    Case("wide", G=128, L=400, S=200, D=512),
    Case("bfloat16", dtype=torch.bfloat16),
    Case("float16, odd", dtype=torch.float16, S=49, D=33),
    # (more features than the products take at once; rows in place, where they fill whole vectors)
    Case("several tiles", G=530, L=350, S=330, D=70, sub_centres=2, filter_above=0.3),
    Case("in place", G=300, L=345, S=None, D=64),
    Case("in place, bfloat16", L=345, S=None, D=64, dtype=torch.bfloat16),
    Case("sub-centres", sub_centres=5, G=17),
    Case("filter", filter_above=0.1),
    Case("together", sub_centres=2, filter_above=0.3, dtype=torch.bfloat16, L=230, S=220),
    Case("labels", labels=8, G=33),
    Case("labels, several tiles", labels=3, G=530, L=350, S=330, D=70, sub_centres=2, filter_above=0.3),
    Case("scale 300", scale=300.0),
    Case("no scale to speak of", scale=1e-3),
]


def exact(logits: Logits) -> Logits:
    return replace(logits, unit_GD=logits.unit_GD.double())


def logit_grad_for(logits: Logits, denominator_G: torch.Tensor) -> LogitGrad:
    torch.manual_seed(1)
    factor_G = torch.where(denominator_G > 0, 0.5 / denominator_G, 0.0)
    return LogitGrad(factor_G, torch.randn(logits.target_G.shape))


def gradient(kernel, logits: Logits, logit_grad: LogitGrad) -> torch.Tensor:
    """All chunks, which have to be ascending and complete."""
    parts, place = [], 0
    for begin, end, grad_KD in kernel.centre_gradients(logits, logit_grad):
        assert begin == place
        assert grad_KD.shape == (end - begin, logits.unit_GD.shape[1])
        place = end
        parts.append(grad_KD.clone())
        grad_KD.fill_(torch.nan)  # the taker's to overwrite
    assert place == logits.num_sampled
    return torch.cat(parts)


def check_nearest(found: Nearest, cos_GC: torch.Tensor, error: float) -> None:
    """Beside the cosines with all classes, (G, classes)."""
    k = found.cosine_GK.shape[1]
    torch.testing.assert_close(found.cosine_GK.double(), cos_GC.topk(k).values, rtol=0, atol=error)
    torch.testing.assert_close(found.cosine_GK.double(), cos_GC.gather(1, found.class_GK), rtol=0, atol=error)
    assert all(len(set(row)) == k for row in found.class_GK.tolist())


def check_a_centre_that_is_too_long(kernel, logits: Logits, logit_grad: LogitGrad) -> None:
    """As a centre of length 0 it would have cosine 0 and never move."""
    logits.centre_LD[5] = 4.5e19
    assert kernel.sums(logits).denominator_G[logits.target_G != 5].isnan().all()
    grad_SD = gradient(kernel, logits, logit_grad)
    assert grad_SD.isnan().any(dim=1).nonzero().flatten().tolist() == [5]
    assert grad_SD[5].isnan().all()


def differences(found, wanted) -> list[float]:
    """Of log denominators; of weighted sum and gradient relative to their largest element."""
    log = [x.clamp(min=1e-300).log() for x in (found[0].denominator_G, wanted[0].denominator_G)]
    result = [(log[0] - log[1]).abs().max().item()]
    for ours, theirs in [(found[0].weighted_sum_GD, wanted[0].weighted_sum_GD), (found[1], wanted[1])]:
        result.append(((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)).item())
    return result


def both_passes(kernel, logits: Logits, logit_grad: LogitGrad | None = None):
    sums = kernel.sums(logits)
    logit_grad = logit_grad or logit_grad_for(logits, sums.denominator_G)
    dtype = logits.unit_GD.dtype
    logit_grad = LogitGrad(logit_grad.factor_G, logit_grad.target_grad_G.to(dtype))
    return sums, gradient(kernel, logits, logit_grad)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_equals_plain_float64(variant, case):
    logits = case.logits()
    wanted = both_passes(PlainKernel(), exact(logits))
    logit_grad = logit_grad_for(logits, wanted[0].denominator_G)
    found = both_passes(CpuKernel("fp32", variant), logits, logit_grad)
    assert max(differences(found, wanted)) < 1e-5 * max(1.0, case.scale / 64)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_operands_cost_less_than_bfloat16_throughout(variant, case):
    """The naive way computes in bfloat16 from the operands to the sums; here all but the operands is float32."""
    logits = case.logits()
    wanted = both_passes(PlainKernel(), exact(logits))
    logit_grad = logit_grad_for(logits, wanted[0].denominator_G)
    ours = differences(both_passes(CpuKernel("bf16", variant), logits, logit_grad), wanted)
    naive = replace(logits, unit_GD=logits.unit_GD.bfloat16())
    theirs = differences(both_passes(PlainKernel(), naive, logit_grad), wanted)
    assert ours[0] <= logits.scale * 2**-8  # both operands of each of D products rounded by 2^-9 at most
    for mine, other in zip(ours, theirs, strict=True):
        assert mine <= other + 2**-7


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize(
    ("G", "S", "D"), [(1, 1, 1), (7, 50, 25), (33, 193, 33), (65, 401, 70), (32, 192, 64), (5, 17, 512)]
)
def test_operands_that_bfloat16_holds_cost_nothing(variant, G, S, D):
    """Small integers, centres of length 1 or 2, factors that are powers of 2, scale 0 where exponentials become
    operands: products of bfloat16 are then exact, and what is left is float32 rounding."""
    torch.manual_seed(0)
    unit_GD = torch.randint(-4, 5, (G, D)) / 64
    centre_SD = torch.zeros(S, D)
    places = torch.rand(S, D).argsort(1)[:, : 4 if D >= 4 else 1]
    centre_SD.scatter_(1, places, torch.randint(0, 2, places.shape) * 2.0 - 1)
    target_G = torch.randint(-1, S, (G,))
    logit_grad = LogitGrad(2.0 ** torch.randint(-3, 3, (G,)).double(), torch.randn(G))
    for scale in (0.0, 8.0):
        logits = Logits(unit_GD, centre_SD, None, target_G, scale, Negatives())
        kernel = CpuKernel("bf16", variant)
        found, wanted = kernel.sums(logits), PlainKernel().sums(exact(logits))
        torch.testing.assert_close(found.denominator_G, wanted.denominator_G, rtol=1e-6, atol=0)
        if scale == 0:
            torch.testing.assert_close(found.weighted_sum_GD.double(), wanted.weighted_sum_GD, rtol=1e-6, atol=1e-7)
            plain = gradient(
                PlainKernel(), exact(logits), replace(logit_grad, target_grad_G=logit_grad.target_grad_G.double())
            )
            ours = gradient(kernel, logits, logit_grad).double()
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def dense_cosines(logits: Logits, operands: torch.dtype = torch.float64) -> torch.Tensor:
    """(G, classes), float64, of operands that are rounded as a pass does."""
    centre_LD = logits.centre_LD if logits.row_S is None else logits.centre_LD[logits.row_S]
    norm = centre_LD.double().norm(dim=1)
    centre_SD = centre_LD.to(operands).double() / torch.where(norm > 0, norm, 1.0)[:, None]
    cos_GS = logits.unit_GD.to(operands).double() @ centre_SD.T
    return cos_GS.unflatten(1, (-1, logits.sub_centres)).amax(2)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_nearest_classes_are_those_of_the_dense_product(variant, case):
    """Alone in float32, and in the first pass with its products; the pass keeps its bits."""
    logits = case.logits()
    cos_GC = dense_cosines(logits)
    k = min(9, cos_GC.shape[1])
    for precision in ("fp32", "bf16"):
        kernel = CpuKernel(precision, variant)
        sums, alone = kernel.sums(logits), kernel.sums(logits, num_nearest=k)
        for name in ("denominator_G", "weighted_sum_GD"):
            assert torch.equal(getattr(sums, name), getattr(alone, name))
        assert alone.nearest is not None
        for found, error in ((kernel.nearest(logits, k), 1e-6), (alone.nearest, 1e-6 if precision == "fp32" else 0.01)):
            check_nearest(found, cos_GC, error)


@pytest.mark.parametrize("variant", RUNNABLE)
def test_the_nearest_of_few_or_equal_or_nan_centres(variant):
    unit_GD, target_G = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([-1, -1])
    centre_LD = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    kernel = CpuKernel("fp32", variant)

    def nearest(centre_LD: torch.Tensor, k: int):
        return kernel.nearest(Logits(unit_GD, centre_LD, None, target_G, 1.0, Negatives()), k)

    found = nearest(centre_LD, 5)
    assert found.class_GK.tolist() == [[0, 1, 2, -1, -1], [2, 0, 1, -1, -1]]
    assert found.cosine_GK.tolist() == [[1, 1, 0, -torch.inf, -torch.inf], [1, 0, 0, -torch.inf, -torch.inf]]
    assert nearest(centre_LD[:0], 1).class_GK.tolist() == [[-1], [-1]]
    centre_LD[1, 0] = torch.nan
    found = nearest(centre_LD, 2)
    assert found.cosine_GK.isnan().tolist() == [[True, False]] * 2
    assert found.class_GK.tolist() == [[1, 0], [1, 2]]


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_repeats_bit_by_bit_and_threads_change_rounding_only(precision, variant):
    logits = Case("", G=33, L=1500, S=1201, D=64).logits()
    kernel = CpuKernel(precision, variant)
    logit_grad = logit_grad_for(logits, kernel.sums(logits).denominator_G)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            results.append(both_passes(kernel, logits, logit_grad))
    finally:
        torch.set_num_threads(before)
    for name in ("denominator_G", "weighted_sum_GD"):
        alone, first, second = (getattr(sums, name) for sums, _ in results)
        assert torch.equal(first, second)
        torch.testing.assert_close(alone, first, rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0][1], results[1][1])  # every row's gradient is one thread's work


def test_denominators_that_float32_cannot_hold_are_still_exact():
    """Every cosine is -1 at scale 300: exp(-600) against the shift."""
    feat_GD = torch.tensor([[1.0, 0.0]])
    centre_LD = torch.tensor([[-1.0, 0.0], [-2.0, 0.0]])
    logits = Logits(feat_GD, centre_LD, None, torch.tensor([-1]), 300.0, Negatives())
    sums = CpuKernel("fp32").sums(logits)
    assert abs(sums.denominator_G.log().item() - (torch.tensor(2.0).log().item() - 300)) < 1e-4
    assert torch.allclose(sums.weighted_sum_GD, torch.tensor([[-1.0, 0.0]]))


@pytest.mark.parametrize("variant", RUNNABLE)
def test_nan_features_are_not_hidden_and_stay_in_their_row(variant):
    logits = Case("", S=None, L=293).logits()
    logits.unit_GD[0, 0] = torch.nan
    sums = CpuKernel("bf16", variant).sums(logits)
    assert sums.denominator_G[0].isnan()
    assert sums.denominator_G[1:].isfinite().all()
    assert sums.weighted_sum_GD[0].isnan().all()
    assert sums.weighted_sum_GD[1:].isfinite().all()


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_filter_is_as_sharp_with_operands_of_bfloat16(variant, dtype):
    """At scale 0, nearly, a denominator counts the classes that are left in."""

    def count(kernel, logits: Logits) -> list[float]:
        return kernel.sums(logits).denominator_G.round().tolist()

    logits = Case("", G=33, L=400, S=None, D=37, dtype=dtype, scale=1e-6, filter_above=0.3).logits()
    wanted = count(PlainKernel(), exact(logits))
    assert count(PlainKernel(), exact(replace(logits, unit_GD=logits.unit_GD.bfloat16().float()))) != wanted
    assert count(CpuKernel("bf16", variant), logits) == wanted


@pytest.mark.parametrize("variant", [None, *RUNNABLE])
def test_a_centre_too_long_for_float32_is_not_hidden(variant):
    logits = Case("", S=None).logits()
    kernel = CpuKernel("bf16", variant) if variant else PlainKernel()
    ones_G = torch.ones(len(logits.unit_GD), dtype=torch.float64)
    check_a_centre_that_is_too_long(kernel, logits, logit_grad_for(logits, ones_G))


OPTIMIZERS = [
    RowSGD(0.9, 5e-4),
    RowSGD(0.8, 0.01, nesterov=True),
    RowSGD(0.0, 0.0),
    RowAdamW(weight_decay=0.1),
    RowAdagrad(weight_decay=0.01),
]


STORED = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


def pairwise():
    """Every variant meets every optimizer, every storage and both widths; every optimizer meets every storage. (Width
    64 fills whole vectors in every variant, 40 in none.)"""
    for v, variant in enumerate(RUNNABLE):
        for i, optimizer in enumerate(OPTIMIZERS):
            for j, dtypes in enumerate(STORED):
                if (i + j + v) % 2 == 0:
                    yield pytest.param(variant, optimizer, (40, 64)[(i + j // 2) % 2], *dtypes)


@pytest.mark.parametrize(("variant", "optimizer", "width", "dtype", "state_dtype"), list(pairwise()))
def test_the_fused_update_is_that_of_the_row_optimizer(variant, optimizer, width, dtype, state_dtype):
    """Same gradients, same noise: what differs is float32 rounding, which may tip a stored number to its neighbour."""
    logits = Case("", L=301, S=211, D=width, G=12).logits()
    kernel = CpuKernel("fp32", variant)
    if isinstance(optimizer, RowAdamW) and state_dtype == torch.float16:
        state_dtype = torch.float32  # squares of gradients are below what float16 holds: refused
    storage = Storage(dtype, state_dtype)
    stores = [RowTable(1000, 301, width, 3, optimizer, storage, "cpu") for _ in range(2)]
    for step in range(3):
        for fused, store in zip((True, False), stores, strict=True):
            table, rows = store.fetch(logits.row_S, step)
            here = replace(logits, centre_LD=table, row_S=rows)
            logit_grad = logit_grad_for(here, kernel.sums(here).denominator_G)
            if fused:
                assert kernel.update(here, logit_grad, store, 0.1, step)
                continue
            for begin, end, grad_KD in kernel.centre_gradients(here, logit_grad):
                store.update(rows[begin:end], begin, end, grad_KD, 0.1, step)
    first, second = (store.row_state() for store in stores)
    assert torch.equal(first["touched"], second["touched"])
    for name in first:
        fused, apart = first[name].float(), second[name].float()
        if torch.float32 in (dtype, first[name].dtype) and torch.float32 in (state_dtype, first[name].dtype):
            # (AdamW and Adagrad divide by the gradient's size: where that is all rounding, so is the quotient)
            close = torch.isclose(fused, apart, rtol=1e-4, atol=1e-6).float().mean()
            assert close > (0.999 if isinstance(optimizer, RowSGD) else 0.98)
        else:
            assert (fused == apart).float().mean() > 0.97
            torch.testing.assert_close(fused, apart, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("room", "sub_centres", "G"), [(0, 5, 12), (100, 1, 12), (700, 5, 270), (10_000, 1, 12)])
def test_what_the_first_pass_leaves_to_the_second_changes_no_bit(variant, precision, sub_centres, room, G, monkeypatch):
    """Room for none, for less than a block, for some and for all of the exponentials."""
    case = Case("", L=301, S=211, D=40, G=G, sub_centres=sub_centres)
    logits = case.logits()
    kernel = CpuKernel(precision, variant)
    low = precision == "bf16"
    padded = kernel.compiled.head_cache_row(case.G, low)
    monkeypatch.setattr("partial_fc.head.kernels.cpu.EXP_CACHE_BYTES", (2 if low else 4) * padded * room)
    monkeypatch.setattr("partial_fc.head.kernels.cpu.EXP_CACHE_SHARE", 0.0)
    sums = kernel.sums(logits)
    logit_grad = logit_grad_for(logits, sums.denominator_G)
    with_cache = replace(logit_grad, cache=sums.cache)

    def moved(grad: LogitGrad) -> torch.Tensor:
        store = RowTable(0, len(logits.centre_LD), case.D, 0, RowSGD(), Storage(torch.float32), "cpu")
        store.all_rows()
        store.centre_LD.copy_(logits.centre_LD)
        assert kernel.update(replace(logits, centre_LD=store.centre_LD), grad, store, 0.1, 0)
        return store.centre_LD

    anew = moved(logit_grad)
    assert torch.equal(moved(with_cache), anew)
    if sums.cache is not None:  # it is what the second pass reads
        kernel._cache.zero_()
        assert not torch.equal(moved(with_cache), anew)
    others = kernel.sums(replace(logits, scale=3.0))  # takes the room over: the former's rights are gone
    assert torch.equal(moved(with_cache), anew)
    assert others.cache is not sums.cache or others.cache is None


def test_where_memory_is_short_less_is_kept(monkeypatch):
    logits = Case("", L=301, S=211, D=40, G=270).logits()
    kernel = CpuKernel("fp32")
    row = 4 * kernel.compiled.head_cache_row(270, False)
    monkeypatch.setattr("partial_fc.head.kernels.cpu.available_memory_bytes", lambda: 16 * 50 * row)
    assert kernel.sums(logits).cache is not None
    assert kernel._cache.nbytes == 50 * row
    monkeypatch.setattr("partial_fc.head.kernels.cpu.available_memory_bytes", lambda: 0)
    assert CpuKernel("fp32").sums(logits).cache is None


class Processor:
    """Stands for `load` where the processor's best is amx; what that computes, alter(job) changes."""

    def __init__(self, alter=None, refuses=False):
        self.alter, self.refuses = alter, refuses

    def __call__(self, variant=None):
        class Library:
            head_best = staticmethod(lambda: b"amx")

        if variant == "portable":
            return Library()
        if variant == "amx" and self.refuses:
            raise RuntimeError("the operating system does not let this process use AMX tiles: Invalid argument")
        real = LOAD("amx_emulated" if variant == "amx" else "portable")
        if variant != "amx" or self.alter is None:
            return real

        class Altered:
            def __getattr__(self, name):
                return getattr(real, name)

            def head_gradients(_self, job):
                failure = real.head_gradients(job)
                self.alter(job._obj)
                return failure

        return Altered()


LOAD = cpu.load


@pytest.fixture
def torch_uses(monkeypatch):
    """torch_uses("AVX2"): what torch says that it uses."""
    return lambda name: monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)


@pytest.mark.parametrize(("capability", "expected"), [("DEFAULT", "portable"), ("AVX2", "avx2")])
def test_the_kernel_uses_no_more_of_the_processor_than_torch(monkeypatch, torch_uses, capability, expected):
    """ATEN_CPU_CAPABILITY lowers both sides of a comparison."""
    torch_uses(capability)
    monkeypatch.setattr(cpu, "load", Processor())
    assert cpu.variant_here.__wrapped__() == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_auto_takes_bf16_only_where_the_kernel_multiplies_such_numbers(monkeypatch, variant):
    monkeypatch.setattr(cpu, "variant_here", lambda: variant)
    assert auto_precision("cpu", torch.device("cpu")) == ("bf16" if variant in ("avx512_bf16", "amx") else "fp32")


def test_amx_is_chosen_where_it_agrees_with_the_variant_without_tiles(monkeypatch, torch_uses):
    torch_uses("AVX512")
    monkeypatch.setattr(cpu, "load", Processor())
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cpu.variant_here.__wrapped__() == "amx"
    assert torch.equal(before, torch.get_rng_state())


def add_to_the_gradient(wrong: float):
    def alter(job):
        ctypes.cast(job.grad, ctypes.POINTER(ctypes.c_float))[5] += wrong

    return alter


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (Processor(add_to_the_gradient(1.0)), "centres' gradient differ .* avx512_bf16, .* is used instead"),
        (Processor(add_to_the_gradient(float("nan"))), "centres' gradient differ .* avx512_bf16, .* is used instead"),
        (Processor(refuses=True), "does not let this process use AMX tiles: Invalid argument"),
    ],
)
def test_amx_that_computes_something_else_or_is_withheld_is_not_used(monkeypatch, torch_uses, processor, words):
    torch_uses("AVX512")
    monkeypatch.setattr(cpu, "load", processor)
    with pytest.warns(RuntimeWarning, match=words):
        assert cpu.variant_here.__wrapped__() == "avx512_bf16"
