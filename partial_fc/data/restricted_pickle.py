"""Unpickler of plain values: lists, tuples, dictionaries, bytes, text, numbers, NumPy arrays of them. Executes no code
in a file: our own classes replace the few functions that such values name, and check NumPy's arguments."""

import functools
import io
import math
import pickle
import pickletools
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES: dict[str, np.dtype[Any] | None] = {d.str[1:]: d for d in map(np.dtype, "?bBhHiIqQefd")} | {"O8": None}
_MOST_TUPLES = 10_000  # in a file with dictionaries
_DAMAGED = (pickle.UnpicklingError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)


def loads(content: bytes, kind: "type[Unpickler] | None" = None) -> Any:
    """Unpickles a value; its arrays are `Array`s. kind: an Unpickler that accepts more than plain values. Raises
    ValueError for a file that is damaged or has other values."""
    unpickler = kind or Unpickler
    try:
        _check_hashed(content, unpickler.has_dictionaries)
        return unpickler(io.BytesIO(content), encoding="bytes").load()  # Python 2's str are image files
    except (EOFError, MemoryError) as error:
        raise ValueError("cut off or damaged: it ends within a value") from error
    except _DAMAGED as error:
        raise ValueError(f"damaged: {error}") from error


def _check_hashed(content: bytes, has_dictionaries: bool) -> None:
    """Raises UnpicklingError for possibly deeply nested hashed tuples, which overflow C's stack: a crash."""
    refused = {"EMPTY_SET", "FROZENSET"} if has_dictionaries else {"EMPTY_SET", "FROZENSET", "DICT", "EMPTY_DICT"}
    num_tuples = 0
    try:
        for operation, _, _ in pickletools.genops(content):
            num_tuples += operation.name.startswith("TUPLE")
            if operation.name in refused or (has_dictionaries and num_tuples > _MOST_TUPLES):
                raise pickle.UnpicklingError(f"{operation.name} is nothing that such a file has, or not so often")
    except UnicodeDecodeError:  # Python 2's protocol 0: quoted str of any bytes
        without, number = re.subn(rb"S'[^\n]*'\n", b"S''\n", content)
        if not number or without == content:
            raise
        _check_hashed(without, has_dictionaries)


class Unpickler(pickle.Unpickler):
    has_dictionaries = False  # whether its files may have dictionaries

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _CLASSES:
            raise ValueError(
                f"it asks for {module:.99}.{name:.99}; such files hold lists, bytes, booleans and uint8 arrays only. "
                "Plain pickle would run it: use that only if you trust the author"
            )
        return _CLASSES[module, name]


class Array:
    """An array of the file. value: the numbers, or a list of objects; None until its state is set."""

    def __init__(self, *_: Any) -> None:
        self.value: NDArray[Any] | list[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        match state:
            case (_, tuple() as shape, _Dtype(dtype=None), False | 0, list() as content):
                fits = shape == (len(content),)
            case (_, tuple() as shape, _Dtype(dtype=np.dtype() as dtype), False | 0, bytes() | bytearray() as content):
                fits = len(shape) in (1, 2) and all(type(n) is int and 0 <= n <= len(content) for n in shape)
                fits = fits and math.prod(shape) * dtype.itemsize == len(content)
            case _:
                raise ValueError("an array whose state is not that of plain numbers")
        if not fits:
            raise ValueError(f"an array whose shape is not that of its {len(content)} bytes or objects")
        self.value = content if isinstance(content, list) else np.frombuffer(content, dtype).reshape(shape)


class _Dtype:
    """A dtype of the file. dtype: None for objects."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        name = code.decode("latin1") if isinstance(code, bytes) else code
        if not isinstance(name, str) or name not in _DTYPES:
            shown = name[:20] if isinstance(name, str) else type(name).__name__
            raise ValueError(f"arrays of dtype {shown}; expected booleans or numbers")
        self.dtype = _DTYPES[name]

    def __setstate__(self, state: Any) -> None:
        match state:
            case (_, "|" | "<" | b"|" | b"<", None, None, None, *_):
                return
        raise ValueError("a dtype whose state is not that of plain little-endian numbers")


class _Function:
    """A class that replaces a function: with a __setstate__, so that a file cannot change it."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it changes a function")


@functools.lru_cache(maxsize=8)
def _encoded(text: str) -> bytes:
    """Encodes a text, once: a file may name it often."""
    return text.encode("latin1")


class _Bytes(_Function):
    """bytes(), bytearray() and codecs.encode(), which Python 3 uses for bytes in protocols below 3."""

    def __new__(cls, content: Any = b"", encoding: Any = None) -> Any:
        if isinstance(content, bytes) and encoding is None:
            return content
        if isinstance(content, str) and encoding in ("latin1", "latin-1"):
            return _encoded(content)
        raise ValueError("bytes with arguments that are not those of plain values")


class _Scalar(_Function):
    def __new__(cls, dtype: Any, content: Any) -> Any:
        if not isinstance(dtype, _Dtype) or dtype.dtype is None or not isinstance(content, bytes):
            raise ValueError("a number whose dtype or bytes are missing")
        return np.frombuffer(content, dtype.dtype, 1)[0].item()


class _FromBuffer(_Function):
    def __new__(cls, content: Any, dtype: Any, shape: Any, order: Any) -> Any:
        array = Array()
        array.__setstate__((1, shape, dtype, order != "C", content))
        return array


_CLASSES: dict[tuple[str, str], type] = {
    **{(module, name): _Bytes for module in ("builtins", "__builtin__") for name in ("bytes", "bytearray")},
    ("_codecs", "encode"): _Bytes,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): Array,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FromBuffer for core in ("core", "_core")},
}
