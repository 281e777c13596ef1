"""Unpickling of plain values: lists, tuples, bytes, text, numbers, NumPy arrays of them. Nothing of the file is run.

A pickle is a program for a small stack machine. This is Python's own machine, the one written in Python, without the
operations that plain values do not need. The few functions that such values name are ours: they check what they are
given before NumPy sees it, and cannot be changed by the file. Memory stays in proportion to the file.
"""

import io
import math
import pickle
import pickletools
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

# Nothing that is hashed: the hash of tuples nested deeply enough overflows the stack.
_ALLOWED = """
    PROTO STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING
    BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
    EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET
    LONG_BINGET GLOBAL STACK_GLOBAL REDUCE
""".split()  # noqa: SIM905 (a list literal would be 40 lines)
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
# b1, i1, u1, ..., f8; objects have none of ours.
_DTYPES: dict[str, np.dtype[Any] | None] = {d.str[1:]: d for d in map(np.dtype, "?bBhHiIqQefd")} | {"O8": None}


def loads(content: bytes, kind: "type[Unpickler] | None" = None) -> Any:
    """The value; its arrays are `Array`s. kind: one that takes more than plain values. Raises ValueError for what is
    damaged or no pickle of plain values."""
    try:
        return (kind or Unpickler)(content).load()
    except EOFError as error:
        raise ValueError("cut off or damaged: it ends within a value") from error
    except (pickle.UnpicklingError, LookupError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"damaged: {error}") from error


class Unpickler(pickle._Unpickler):
    """The one in C asks for as much memory as a size or a memo index of the file says."""

    stack: list[Any]

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)
        super().__init__(self._content, encoding="bytes")  # Python 2's str, as which it wrote image files
        self._encoded: dict[str, bytes] = {}

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _FUNCTIONS:
            raise ValueError(
                f"it asks for {module:.99}.{name:.99}; such files hold lists, bytes, booleans and uint8 arrays only. "
                "Plain pickle would run it: use that only if you trust the author"
            )
        function = _FUNCTIONS[module, name]
        return partial(function, self._encoded) if function is _bytes else function

    def _refuse(self) -> None:
        at = self._content.tell() - 1
        code = self._content.getvalue()[at]
        name = _NAMES.get(code, f"byte {code:#04x}")
        raise ValueError(f"{name} at byte {at} is no operation of plain values; damaged, or another kind of file")

    def _skip_frame(self) -> None:
        self._content.read(8)  # only says how much may be read ahead

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Array | _Dtype):
            raise ValueError("it changes a function")
        self.stack[-1].set_state(state)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **dict.fromkeys(range(256), _refuse),
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if _NAMES[code] in _ALLOWED},
        pickle.FRAME[0]: _skip_frame,
        pickle.BUILD[0]: _build,
        # As bytes: a bytearray that is named many times would have to be copied as often.
        pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],
    }


class Array:
    """An array of the file. content: the bytes of its numbers, or a list of its objects. value: the numbers as NumPy's
    view of these bytes, or that list. Both are None until it is filled, which happens after it is made."""

    __slots__ = ("content", "value")

    def __init__(self) -> None:
        self.content: bytes | list[Any] | None = None
        self.value: NDArray[Any] | list[Any] | None = None

    def set_state(self, state: Any) -> None:
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

    def set_state(self, state: Any) -> None:
        match state:
            case (_, "|" | "<" | b"|" | b"<", None, None, None, *_):
                return
        raise ValueError("a dtype whose state is not that of plain little-endian numbers")


def _bytes(encoded: dict[str, bytes], content: Any = b"", encoding: Any = None) -> bytes:
    """bytes(), bytearray() and codecs.encode(), as which Python 3 writes bytes with protocols below 3.

    A file may name one content often: bytes are not copied, and a text is encoded once.
    """
    if isinstance(content, bytes) and encoding is None:
        return content
    if isinstance(content, str) and encoding in ("latin1", "latin-1"):
        if content not in encoded:
            encoded[content] = content.encode("latin1")
        return encoded[content]
    raise ValueError("bytes with arguments that are not those of plain values")


def _scalar(dtype: Any, content: Any) -> bool | int | float:
    if not isinstance(dtype, _Dtype) or dtype.dtype is None or not isinstance(content, bytes):
        raise ValueError("a number whose dtype or bytes are missing")
    return np.frombuffer(content, dtype.dtype, 1)[0].item()


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> Array:
    array = Array()
    array.set_state((1, shape, dtype, order != "C", content))
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
