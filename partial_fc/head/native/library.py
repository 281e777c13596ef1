"""Loads the compiled kernel and calls its functions, with checked tensors."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from partial_fc.head.native.build import load_library, taken

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TYPES = {
    **{"P": ctypes.c_void_p, "f": ctypes.c_float, "d": ctypes.c_double},
    **{"q": ctypes.c_int64, "i": ctypes.c_int32, "I": ctypes.c_uint32},
}
# Of the tensors whose memory C++ reads: dtype, and the sizes in its job that its shape is made of.
_READ = {
    "row": (torch.int64, "S"),
    "number": (torch.int64, "S"),
    "target": (torch.int64, "GT"),
    "unit": (torch.float32, "GD"),
    "factor": (torch.float32, "G"),
    "target_grad": (torch.float32, "GT"),
    # (of RowJob)
    "label": (torch.int64, "GT"),
    "active": (torch.int64, "S"),
    "sum": (torch.float32, "GD"),
    "weight": (torch.float32, "G"),
}


@functools.cache
def load(variant: str) -> ctypes.CDLL:
    """Returns the compiled kernel of the variant, compiling it at first use. Raises CompilerNotFoundError without a
    compiler, RuntimeError if the operating system refuses the instructions."""
    compiled = load_library(variant)
    functions = ("prepare", "best", "sums", "nearest", "gradients", "update", "catch_up")
    for name in (*functions, "row_targets", "row_gradients", "job_layout", "row_job_layout"):
        getattr(compiled, f"head_{name}").restype = ctypes.c_char_p
    compiled.head_cache_row.restype = ctypes.c_int64
    compiled.head_cache_row.argtypes = [ctypes.c_int64, ctypes.c_int32]
    refusal = compiled.head_prepare()
    if refusal:
        raise RuntimeError(refusal.decode())
    return compiled


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """Returns the library that the kernel takes here, which any variant's functions on rows are in; None: it cannot be
    made, of which the kernel's choice has warned."""
    try:
        return load(taken()[0])
    except (ValueError, RuntimeError, OSError):
        return None


def call(compiled: ctypes.CDLL, function: str, arguments: dict[str, Any]) -> None:
    """Calls a function with arguments by field of its struct (job.h); the tensors among them by where they lie. Raises
    ValueError for a tensor that is not as C++ reads it, RuntimeError with what went wrong there."""
    _check_tensors(arguments)
    rows = function.startswith("head_row_")
    struct = _struct(compiled.head_row_job_layout() if rows else compiled.head_job_layout())
    fields = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in arguments.items()}
    failure = getattr(compiled, function)(ctypes.byref(struct(**fields)))
    if failure:
        raise RuntimeError(f"{function}: {failure.decode()}")


@functools.cache
def _struct(layout: bytes) -> type[ctypes.Structure]:
    """The struct of C++, by its size and a line with name, type, length and offset for each field."""
    size, *lines = layout.decode().split("\n")
    fields: list[tuple[str, Any]] = []
    for name, letter, length, _ in map(str.split, lines):
        fields.append((name, _TYPES[letter] * int(length) if int(length) else _TYPES[letter]))
    struct = type("Struct", (ctypes.Structure,), {"_fields_": fields})
    assert ctypes.sizeof(struct) == int(size), "job.h: the list of fields lacks some"
    for name, _, _, offset in map(str.split, lines):
        assert getattr(struct, name).offset == int(offset), f"job.h: the list of fields has {name} at another place"
    return struct


def _check_tensors(arguments: dict[str, Any]) -> None:
    for name, (dtype, letters) in _READ.items():
        if (tensor := arguments.get(name)) is None:
            continue
        shape = tuple(arguments[letter] for letter in letters)
        if (tensor.dtype, tensor.shape) != (dtype, shape) or not tensor.is_contiguous():
            raise ValueError(
                f"the C++ kernel's {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
                f"expected {dtype} of shape {shape} without gaps"
            )
