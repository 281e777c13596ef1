"""Loads the compiled kernel, and says what its functions take and return."""

import ctypes
import functools

from partial_fc.head.native.build import load_library
from partial_fc.head.native.job import Job, RowJob, check_layout


@functools.cache
def load(variant: str) -> ctypes.CDLL:
    """Returns the compiled kernel of the variant, compiling it at first use. Raises CompilerNotFoundError without a
    compiler, RuntimeError if the operating system refuses the instructions, AssertionError if job.h and job.py
    differ."""
    compiled = load_library(variant)
    functions = ("best", "prepare", "sums", "nearest", "gradients", "update", "row_targets", "row_gradients")
    for name in (*functions, "job_layout", "row_job_layout"):
        getattr(compiled, f"head_{name}").restype = ctypes.c_char_p
    check_layout(Job, compiled.head_job_layout().decode())
    check_layout(RowJob, compiled.head_row_job_layout().decode())
    compiled.head_cache_row.restype = ctypes.c_int64
    compiled.head_cache_row.argtypes = [ctypes.c_int64, ctypes.c_int32]
    refusal = compiled.head_prepare()
    if refusal:
        raise RuntimeError(refusal.decode())
    return compiled
