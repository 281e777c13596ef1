"""Chooses the kernel: `choose(impl, ...)` returns one."""

import importlib.metadata
import importlib.util
import warnings
from typing import get_args

import torch

from partial_fc.head.kernels import AutoPrecision, Impl, Kernel, Precision
from partial_fc.machine import has_bf16

TRITON = (3, 4)  # the oldest with triton.knobs and tensor descriptors


def choose(impl: Impl, device: torch.device, dtype: torch.dtype, precision: AutoPrecision) -> Kernel:
    """Returns the kernel that `impl` names; "auto": the fastest for this device and dtype. On a CPU without a compiler
    that works that is the plain one, and a RuntimeWarning says so. precision "auto": `auto_precision`."""
    if precision not in get_args(AutoPrecision):
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(get_args(AutoPrecision))}")
    if impl == "auto":
        if dtype == torch.float64:
            impl = "plain"
        elif device.type == "cuda":
            impl = "triton"
        else:
            impl = _auto_on_cpu()
    if impl == "plain":
        from partial_fc.head.kernels.plain import PlainKernel

        return PlainKernel()
    if dtype != torch.float32:
        raise ValueError(f"impl {impl!r} computes in float32; for {dtype} use impl 'plain'")
    if impl == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ValueError(
                "impl 'triton' needs the package triton, which is not installed here: `pip install triton` (CUDA "
                "builds of torch bring it along), or use impl 'plain', or 'cpu' with centres on the CPU"
            )
        found = importlib.metadata.version("triton")
        if tuple(map(int, found.split(".")[:2])) < TRITON:
            raise ValueError(
                f"impl 'triton' needs triton {TRITON[0]}.{TRITON[1]} or newer, which torch 2.8 for CUDA brings along; "
                f"found {found} with torch {torch.__version__}: install a newer torch, or use impl 'plain'"
            )
        from partial_fc.head.kernels.triton import TritonKernel, runs_on

        if not runs_on(device):
            raise ValueError(f"impl 'triton' with centres on {device}: it needs a CUDA device; use 'cpu' or 'plain'")
        return TritonKernel(auto_precision(impl, device) if precision == "auto" else precision)
    if impl == "cpu":
        if device.type != "cpu":
            raise ValueError(f"impl 'cpu' with centres on {device}; use 'triton' or 'plain' there")
        from partial_fc.head.kernels.cpu import CpuKernel

        return CpuKernel(auto_precision(impl, device) if precision == "auto" else precision)
    raise ValueError(f"impl is {impl!r}; expected one of {', '.join(get_args(Impl))}")


def auto_precision(impl: str, device: torch.device) -> Precision:
    """Returns bf16 if the hardware multiplies bfloat16 numbers, else fp32. Rounding to bfloat16 and multiplying in
    float32 has to be asked for."""
    if impl == "cpu":
        from partial_fc.head.kernels.cpu import BF16_VARIANTS, variant_here

        return "bf16" if variant_here() in BF16_VARIANTS else "fp32"
    return "bf16" if impl == "triton" and has_bf16(device) else "fp32"


def _auto_on_cpu() -> Impl:
    from partial_fc.head.kernels import cpu
    from partial_fc.head.native.build import CompilerNotFoundError

    try:
        cpu.load(cpu.variant_here())
    except CompilerNotFoundError as error:
        warnings.warn(f"{error}. impl 'auto' takes 'plain' on this machine", RuntimeWarning, stacklevel=3)
        return "plain"
    return "cpu"
