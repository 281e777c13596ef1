"""Unpickler of plain values: lists, tuples, dictionaries, bytes, text, numbers, NumPy arrays of them. Executes no code
in a file: functions and classes of our own stand for the few that such values name, and check NumPy's arguments."""

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES: dict[str, np.dtype[Any] | None] = {d.str[1:]: d for d in map(np.dtype, "?bBhHiIqQefd")} | {"O8": None}


def loads(content: bytes, kind: "type[Unpickler] | None" = None) -> Any:
    """Unpickles a value; its arrays are `Array`s. kind: an Unpickler that accepts more than plain values. Raises
    ValueError for a file that is damaged or has other values."""
    try:
        return (kind or Unpickler)(io.BytesIO(content), encoding="bytes").load()  # Python 2's str are image files
    except _Refused:
        raise
    except Exception as error:  # the unpickler raises nearly any error for damaged files
        raise ValueError(f"cut off or damaged: {error}") from error


class _Refused(ValueError):
    """A file that asks for what is not plain."""


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _KNOWN:
            raise _Refused(
                f"it asks for {module:.99}.{name:.99}; such files hold lists, bytes, booleans and uint8 arrays only. "
                "Plain pickle would run it: use that only if you trust the author"
            )
        return _KNOWN[module, name]


class Array:
    """An array of the file. value: the numbers, or a list of objects; None until its state is set."""

    def __init__(self, *_: Any) -> None:
        self.value: NDArray[Any] | list[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        if isinstance(content, list) and dtype.dtype is None:
            self.value = content
        elif is_fortran or math.prod(shape) * dtype.dtype.itemsize != len(content):
            raise ValueError(f"an array of shape {shape} of {len(content)} bytes")
        else:
            self.value = np.frombuffer(content, dtype.dtype).reshape(shape)


class _Dtype:
    """A little-endian dtype of the file. dtype: None for objects."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        self.dtype = _DTYPES[code.decode("latin1") if isinstance(code, bytes) else code]

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("|", "<", b"|", b"<"):
            raise ValueError("an array of big-endian numbers")


def _bytes(content: bytes | str = b"", encoding: str = "latin1") -> bytes:
    """Does what bytes(), bytearray() and codecs.encode() do in protocols below 3, and nothing more."""
    return content.encode("latin1") if isinstance(content, str) else bytes(memoryview(content))


def _scalar(dtype: _Dtype, content: bytes) -> Any:
    return np.frombuffer(content, dtype.dtype or "V", 1)[0].item()


def _from_buffer(content: Any, dtype: _Dtype, shape: Any, order: str) -> Array:
    array = Array()
    array.__setstate__((1, shape, dtype, order != "C", content))
    return array


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    **{(module, name): _bytes for module in ("builtins", "__builtin__") for name in ("bytes", "bytearray")},
    ("_codecs", "encode"): _bytes,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): Array,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}
