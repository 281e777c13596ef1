"""`make bench-gpu`: the head's Triton kernel on one GPU, beside the device's own matrix-product rate.

    python -m benchmarks.gpu --classes 1000000 --batch 1024 --dim 512

Both are measured in one run, in turn, since a device's clock drifts; medians over the rounds are reported. Work is
counted as 6 * G * S * D, as if the logits were formed but once: 8 * G * S * D are carried out (kernels/triton.py).
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
import tyro

from partial_fc.head.kernels import Kernel, LogitGrad, Logits, Precision
from partial_fc.head.margin import Negatives

MATMUL_SIZE = 8192  # large enough for any device's best rate; 128 MiB a matrix


@dataclass(frozen=True)
class GpuOptions:
    """Measures the kernel on random features and centres, and prints one JSON line."""

    classes: int = 1_000_000
    """Classes of this GPU: all take part."""
    batch: int = 1024
    """Global batch."""
    dim: int = 512
    """Width of a feature."""
    precision: Precision = "bf16"
    """Precision of the products' operands; the centres are stored in bf16 either way."""
    rows: bool = False
    """Centres are found through row numbers, as they are where classes are sampled."""
    rounds: int = 10
    """Timed rounds, after two that are not."""


def bench_gpu(options: GpuOptions) -> None:
    """ValueError where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} finds no CUDA device; this benchmark needs one (PyTorch for CUDA, a driver)"
        )
    # Here, since only PyTorch for CUDA brings Triton.
    import triton

    from partial_fc.head.kernels.triton import TritonKernel

    kernel = TritonKernel(options.precision)
    logits, logit_grad = _problem(options, kernel)
    parts: dict[str, Callable[[], object]] = {
        "matmul": _matmul(),
        "sums": lambda: kernel.sums(logits),
        "centre_gradients": lambda: _pass_over(kernel, logits, logit_grad),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(options.rounds + 2):
        for name, run in parts.items():
            elapsed = _seconds(run)
            if turn >= 2:
                seconds[name].append(elapsed)
    matmul_s, sums_s, gradients_s = (median(seconds[name]) for name in parts)
    matmul_flops = 2 * MATMUL_SIZE**3 / matmul_s
    kernel_flops = 6 * options.batch * options.classes * options.dim / (sums_s + gradients_s)
    line = {
        **asdict(options),
        "device": torch.cuda.get_device_name(),
        "sums_s": round(sums_s, 6),
        "centre_gradients_s": round(gradients_s, 6),
        "tflops": round(kernel_flops / 1e12, 1),
        "matmul_tflops": round(matmul_flops / 1e12, 1),
        "share_of_matmul": round(kernel_flops / matmul_flops, 3),
        "peak_bytes": _peak_bytes(parts["sums"], parts["centre_gradients"]),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(json.dumps(line))


def _problem(options: GpuOptions, kernel: Kernel) -> tuple[Logits, LogitGrad]:
    """A first step's: centres as they start, target classes anywhere, the gradient of a softmax."""
    generator = torch.Generator("cuda").manual_seed(0)
    G, L, D = options.batch, options.classes, options.dim
    feat_GD = torch.randn(G, D, generator=generator, device="cuda")
    centre_LD = torch.empty(L, D, dtype=torch.bfloat16, device="cuda").normal_(0, 0.01, generator=generator)
    logits = Logits(
        torch.nn.functional.normalize(feat_GD),
        centre_LD,
        torch.arange(L, device="cuda") if options.rows else None,
        torch.randint(0, L, (G,), generator=generator, device="cuda"),
        64.0,
        Negatives(),
    )
    factor_G = 64.0 / G / kernel.sums(logits, with_weighted_sum=False).denominator_G
    return logits, LogitGrad(factor_G, torch.full((G,), -64.0 / G, device="cuda"))


def _matmul() -> Callable[[], object]:
    """The largest rate that bf16 products reach here."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _pass_over(kernel: Kernel, logits: Logits, logit_grad: LogitGrad) -> None:
    for _ in kernel.centre_gradients(logits, logit_grad):
        pass


def _seconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0


def _peak_bytes(*runs: Callable[[], object]) -> int:
    """Bytes that they allocate at most, beyond what was there before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for run in runs:
        run()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    try:
        bench_gpu(tyro.cli(GpuOptions))
    except ValueError as error:
        sys.exit(f"bench-gpu: {error}")
