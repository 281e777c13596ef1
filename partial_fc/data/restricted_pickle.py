"""Unpickling of plain values: lists, tuples, bytes, text, numbers, NumPy arrays of them. Nothing of the file is run.

A pickle is a program for a small stack machine. Before Python's unpickler sees one, a walk over its operations lets
pass only those of plain values, and no size or memo index beyond the file, which would be asked for as memory. The
unpickler reads the very operations that were checked, and gets stand-ins for the few functions that such values name:
they check what they are given before NumPy sees it, and cannot be changed by the file. Memory stays in proportion to
the file.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Nothing that is hashed: the hash of tuples nested deeply enough overflows the stack.
_ALLOWED = """
    PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT
    BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES
    BINBYTES8 BYTEARRAY8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT
    MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
""".split()  # noqa: SIM905 (a list literal would be 45 lines)
_OPERATIONS = {ord(opcode.code): opcode for opcode in pickletools.opcodes if opcode.name in _ALLOWED}
# Where a length stands before what it counts: its own bytes, and whether it is signed.
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: (1, False),
    pickletools.TAKEN_FROM_ARGUMENT4: (4, True),
    pickletools.TAKEN_FROM_ARGUMENT4U: (4, False),
    pickletools.TAKEN_FROM_ARGUMENT8U: (8, False),
}
# b1, i1, u1, ..., f8; objects have none of ours.
_DTYPES: dict[str, np.dtype[Any] | None] = {d.str[1:]: d for d in map(np.dtype, "?bBhHiIqQefd")} | {"O8": None}


def loads(content: bytes) -> Any:
    """The value; its arrays are `Array`s. Raises ValueError for what is damaged or no pickle of plain values."""
    operations = bytearray(content)
    _check_operations(operations)
    try:
        return _Unpickler(operations).load()
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"damaged: {error}") from error


def _check_operations(content: bytearray) -> None:
    """Raises ValueError for an operation that plain values do not need, or that asks for more than the file has. Puts
    others in the place of two, of the same length."""
    at, opcode = 0, None
    while opcode is None or opcode.name != "STOP":
        start = at
        opcode = _OPERATIONS.get(content[at]) if at < len(content) else None
        if opcode is None:
            code = content[at : at + 1]
            name = next(
                (other.name for other in pickletools.opcodes if other.code.encode("latin1") == code), repr(code)
            )
            raise ValueError(f"{name} at byte {at} is no operation of plain values; damaged, or not a file of pairs")
        at = _end_of_argument(content, at + 1, opcode)
        if opcode.name in ("PUT", "LONG_BINPUT"):
            # The unpickler makes room for as many values as the largest index says.
            argument = content[start + 1 : at]
            index = int(argument) if opcode.name == "PUT" else int.from_bytes(argument, "little")
            if not 0 <= index <= start:
                raise ValueError(f"damaged: memo index {index} at byte {start}")
        elif opcode.name == "FRAME":
            # Only says how much may be read ahead; but at an operation across a frame's end the unpickler loses bytes,
            # and reads others than were checked. Three zeros are pushed and popped instead.
            content[start:at] = b"K\x000" * 3
        elif opcode.name == "BYTEARRAY8":
            # One that is named many times would have to be copied as often.
            content[start : start + 1] = pickle.BINBYTES8


def _end_of_argument(content: bytearray, at: int, opcode: pickletools.OpcodeInfo) -> int:
    """Where the next operation stands, if this one's argument begins at `at`."""
    num_bytes = opcode.arg.n if opcode.arg else 0
    if num_bytes == pickletools.UP_TO_NEWLINE:
        for _ in range(2 if opcode.name == "GLOBAL" else 1):
            at = content.find(b"\n", at) + 1
            if at == 0:
                raise ValueError(f"cut off: {opcode.name} has no end")
        return at
    if num_bytes in _LENGTHS:
        width, signed = _LENGTHS[num_bytes]
        num_bytes = int.from_bytes(content[at : at + width], "little", signed=signed)
        at += width
    _check_length(content, at, num_bytes)
    return at + num_bytes


def _check_length(content: bytearray, at: int, num_bytes: int) -> None:
    if not 0 <= num_bytes <= len(content) - at:
        left = max(0, len(content) - at)
        raise ValueError(f"cut off or damaged: {num_bytes} bytes are announced at byte {at}, {left} follow")


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytearray) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")  # Python 2's str, as which it wrote image files
        self._encoded: dict[int, tuple[str, bytes]] = {}

    def find_class(self, module: str, name: str) -> "_Function":
        if (module, name) not in _FUNCTIONS:
            raise ValueError(
                f"it asks for {module:.99}.{name:.99}; such files hold lists, bytes, booleans and uint8 arrays only. "
                "Plain pickle would run it: use that only if you trust the author"
            )
        function = _FUNCTIONS[module, name]
        return _Function(partial(function, self._encoded) if function is _bytes else function)


class _Function:
    """Stands for a function that the file names."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it changes a function")


class Array:
    """An array of the file. content: the bytes of its numbers, or a list of its objects. value: the numbers as NumPy's
    view of these bytes, or that list. Both are None until it is filled, which happens after it is made."""

    __slots__ = ("content", "value")

    def __init__(self) -> None:
        self.content: bytes | list[Any] | None = None
        self.value: NDArray[Any] | list[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        match state:
            case (_, tuple() as shape, _Dtype(dtype=dtype), False | 0, bytes() | list() as content):
                pass
            case _:
                raise ValueError("an array whose state is not that of plain numbers")
        dimensions, item_size = ((1,), 1) if dtype is None else ((1, 2), dtype.itemsize)
        bounded = len(shape) in dimensions and all(type(n) is int and 0 <= n <= len(content) for n in shape)
        if not bounded or math.prod(shape) * item_size != len(content) or isinstance(content, list) != (dtype is None):
            raise ValueError(f"an array whose shape is not that of its {len(content)} bytes or objects")
        self.content = content
        self.value = content if isinstance(content, list) else np.frombuffer(content, dtype).reshape(shape)


class _Dtype:
    """A dtype of the file. dtype: None for objects."""

    __slots__ = ("dtype",)

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


def _bytes(encoded: dict[int, tuple[str, bytes]], content: Any = b"", encoding: Any = None) -> bytes:
    """bytes(), bytearray() and codecs.encode(), as which Python 3 writes bytes with protocols below 3.

    A file may name one content often: bytes are not copied, and a text is encoded once. It is kept beside the result,
    so that its id stays its own.
    """
    if isinstance(content, bytes) and encoding is None:
        return content
    if isinstance(content, str) and encoding in ("latin1", "latin-1"):
        if id(content) not in encoded:
            encoded[id(content)] = content, content.encode("latin1")
        return encoded[id(content)][1]
    raise ValueError("bytes with arguments that are not those of plain values")


def _scalar(dtype: Any, content: Any) -> bool | int | float:
    if not isinstance(dtype, _Dtype) or dtype.dtype is None or not isinstance(content, bytes):
        raise ValueError("a number whose dtype or bytes are missing")
    return np.frombuffer(content, dtype.dtype, 1)[0].item()


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> Array:
    array = Array()
    array.__setstate__((1, shape, dtype, order != "C", content))
    return array


def _argument_only(*_: Any) -> None:
    raise ValueError("ndarray with arguments that are not those of plain values")


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    **{(module, name): _bytes for module in ("builtins", "__builtin__") for name in ("bytes", "bytearray")},
    ("_codecs", "encode"): _bytes,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _argument_only,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}
