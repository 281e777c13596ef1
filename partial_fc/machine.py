"""What this machine has: bf16 products, a GPU's load, and the memory in use."""

import platform
import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process (cuda: of its tensors on the GPU) since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status_bytes("VmHWM")


def gpu_load(device: torch.device) -> str | None:
    """Returns `nvidia-smi`'s load of a GPU, in a line; None for another device."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    text = f"GPU memory {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
    try:
        return f"{text}, utilization {torch.cuda.utilization(device)} %"
    except ModuleNotFoundError:  # nvidia-ml-py
        return f"{text} (utilization: `pip install nvidia-ml-py`)"


def status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{_STATUS} has no line {name}; memory is measured on Linux only")
    return int(found[1]) * 1024


def has_bf16(device: torch.device) -> bool:
    """Tells whether the device has bfloat16 products, and torch may use them (ATEN_CPU_CAPABILITY)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine() in ("x86_64", "AMD64"):  # oneDNN's own answer includes emulation
        if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
            return False
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
