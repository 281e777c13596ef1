"""Measurements of this machine: rates of matrix products and memory, in a second."""

import timeit
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc.machine import has_bf16


@dataclass(frozen=True)
class Rates:
    """The rates of one process with its threads, or of one GPU."""

    gflops: dict[str, float]  # of matrix products, by dtype: "fp32", "bf16"
    gbytes_per_s: float  # of memory: what is read plus what is written
    gexp_per_s: float  # of numbers in the cache


def measure_rates(device: torch.device, batch: int, dim: int) -> Rates:
    """Measures rates, the best of a few tries, as the machine is shared. Products: the head's, (batch, dim) with (dim,
    8192), and square ones, whichever is faster. Without bf16 the head's kernel rounds to bf16 and multiplies in
    fp32."""
    side = 8192 if device.type == "cuda" else 1024
    shapes = ((batch, dim, 8192), (side, side, side))
    gflops = {"fp32": max(_product_gflops(shape, torch.float32, device) for shape in shapes)}
    gflops["bf16"] = gflops["fp32"]
    if has_bf16(device):
        gflops["bf16"] = max(_product_gflops(shape, torch.bfloat16, device) for shape in shapes)
    x = torch.zeros(1 << 16 if device.type == "cpu" else 1 << 28, device=device)
    y = torch.empty_like(x)
    gexp_per_s = len(x) / 1e9 / _best_seconds(lambda: torch.exp(x, out=y), device)
    return Rates(gflops, _copy_gbytes_per_s(device), gexp_per_s)


def _product_gflops(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    m, k, n = shape
    a, b = (torch.randn(size, device=device).to(dtype) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=dtype, device=device)
    return 2 * m * k * n / 1e9 / _best_seconds(lambda: torch.mm(a, b, out=out), device)


def _copy_gbytes_per_s(device: torch.device) -> float:
    """Measures a copy between two blocks larger than any cache: bytes read plus written."""
    num_bytes = (4096 if device.type == "cuda" else 128) << 20
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * num_bytes / 1e9 / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(work: Callable[[], Tensor], device: torch.device, tries: int = 8) -> float:
    def work_and_wait() -> None:
        work()
        synchronise(device)

    synchronise(device)
    return min(timeit.repeat(work_and_wait, number=1, repeat=tries))


def synchronise(device: torch.device) -> None:
    """Waits for the GPU, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
