"""Calls the C++ functions: mirrors the structs of job.h and checks the tensors that they point to."""

import ctypes
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Job(ctypes.Structure):
    """The arguments of head_sums, head_nearest, head_gradients and head_update."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("G", "D", "S", "T")),
        *((name, ctypes.c_void_p) for name in ("unit", "centre", "row", "target")),
        *((name, ctypes.c_float) for name in ("scale", "shift", "filter_above")),
        *((name, ctypes.c_int32) for name in ("sub_centres", "centre_dtype", "low_precision", "threads")),
        *((name, ctypes.c_void_p) for name in ("denominator", "weighted_sum")),
        ("num_nearest", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("nearest_cos", "nearest_class", "cache")),
        ("cached_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("factor", "target_grad")),
        *((name, ctypes.c_int64) for name in ("begin", "end")),
        ("grad", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("optimizer", "nesterov")),
        *((name, ctypes.c_void_p * 2) for name in ("wide", "scalar")),
        ("wide_dtype", ctypes.c_int32),
        ("centre_key", ctypes.c_uint32),
        ("wide_key", ctypes.c_uint32 * 2),
        *((name, ctypes.c_float) for name in ("lr", "weight_decay", "eps", "beta1", "beta2")),
        ("touched", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("touched_step", "first_row")),
    ]


class RowJob(ctypes.Structure):
    """The arguments of head_row_targets and head_row_gradients."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("G", "D", "S", "T")),
        ("label", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("start", "num_local")),
        *((name, ctypes.c_void_p) for name in ("active", "row", "table", "feat")),
        ("feat_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("table_dtype", "feat_dtype", "sub_centres", "threads")),
        *((name, ctypes.c_void_p) for name in ("unit", "norm", "position", "cos", "elsewhere")),
        *((name, ctypes.c_void_p) for name in ("sum", "weight", "target_grad")),
    ]


def check_layout(struct: type[ctypes.Structure], compiled: str) -> None:
    """Raises AssertionError with the first field that differs if the compiled struct is not laid out as its mirror
    here. compiled: its size, then a line with name, offset and size for each field."""
    size, *lines = compiled.split("\n")
    there = {name: f"offset {offset}, {length} bytes" for name, offset, length in map(str.split, lines)}
    fields = {name: getattr(struct, name) for name, *_ in struct._fields_}
    here = {name: f"offset {field.offset}, {field.size} bytes" for name, field in fields.items()}
    there["the struct"], here["the struct"] = f"{size} bytes", f"{ctypes.sizeof(struct)} bytes"
    for name in (*sorted(here.keys() ^ there.keys()), *here):
        if here.get(name) != there.get(name):
            raise AssertionError(
                f"{struct.__name__}.{name} in native/job.py: {here.get(name, 'no such field')}; "
                f"in native/job.h: {there.get(name, 'no such field')}"
            )


def call(compiled: ctypes.CDLL, function: str, struct: type[ctypes.Structure], arguments: dict[str, Any]) -> None:
    """Calls a function with arguments by field; the tensors among them by where they lie. Raises ValueError for a
    tensor that is not as C++ reads it, RuntimeError with what went wrong there."""
    _check_tensors(arguments)
    fields = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in arguments.items()}
    failure = getattr(compiled, function)(ctypes.byref(struct(**fields)))
    if failure:
        raise RuntimeError(f"{function}: {failure.decode()}")


# Of the tensors whose memory C++ reads: dtype, and the sizes in its job that its shape is made of.
_READ = {
    "row": (torch.int64, "S"),
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


def _check_tensors(arguments: dict[str, Any]) -> None:
    for name, (dtype, letters) in _READ.items():
        tensor = arguments.get(name)
        shape = tuple(arguments[letter] for letter in letters)
        if tensor is not None and ((tensor.dtype, tensor.shape) != (dtype, shape) or not tensor.is_contiguous()):
            raise ValueError(
                f"the C++ kernel's {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
                f"expected {dtype} of shape {shape} without gaps"
            )
