"""Storage of rows between steps: dtypes, their rounding, and plain memory for them."""

import contextlib
import mmap
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from partial_fc import counter_rng

_HUGE_PAGE = 2 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Storage:
    """How rows are stored between steps. A step computes in float32 (float64 where dtype is float64).

    bfloat16 is rounded stochastically: up or down with the probabilities that keep the expected value, so that
    updates far below its 8 bits still add up. float16 and start values are rounded to nearest.
    """

    dtype: torch.dtype = torch.float32  # of the centres: float32, bfloat16, float16 (float64 for checks)
    state_dtype: torch.dtype | None = None  # of the (rows, D) state; None: as dtype. (rows, 1) state is float32
    place: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("state_dtype", self.state_dtype or self.dtype)):
            if dtype not in DTYPES:
                raise ValueError(f"{name} of the centres is {dtype}; expected one of {', '.join(map(str, DTYPES))}")
        if self.place not in ("device", "host"):
            raise ValueError(f"the centres' place is {self.place!r}; expected device or host")


def round_stochastically(x_KD: Tensor, row_K: Tensor, key: int) -> Tensor:
    """float32 -> bfloat16 of the same shape: the upper half of (bits + noise), where the noise of a row and column is
    that of counter_rng.rounding_noise. What is not finite only loses its lower half. row_K: global row numbers."""
    bits = counter_rng.rounding_noise(row_K, x_KD.shape[1], key)
    bits.masked_fill_(x_KD.isfinite().logical_not_(), 0).add_(x_KD.view(torch.int32))
    return bits.view(torch.int16)[:, 1::2].view(torch.bfloat16)


def zeros(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(num_rows, width) zeros. In ordinary memory they begin on a page, and pages take no memory until written to.

    Pages of 2 MiB where the system has them: sampled rows lie far apart, and to look up an ordinary page takes as long
    as to read a row."""
    num_bytes = num_rows * width * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(num_rows, width, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the system refuses {num_bytes} bytes for {num_rows} rows of {width} {dtype}; choose a smaller dtype, "
            "an optimizer with less state, or more processes"
        ) from error
    if num_bytes >= _HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without them (man 2 madvise, EINVAL) has ordinary ones
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(num_rows, width)
