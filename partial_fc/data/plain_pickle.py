"""Pickles of plain values, read without Python's unpickler: nothing that a file says is imported, called or built.

What is understood, in every protocol: None, booleans, numbers, text, bytes, lists, tuples, dicts, and NumPy's arrays
and numbers of booleans, integers and floats. A pickle is a program for a small stack machine; this one knows the
operations of such values only, and does itself what they would have called. Memory stays in proportion to the file:
sizes are checked against what follows, and a value that is used several times exists once.
Source of the format: Python's `pickletools`.
"""

import codecs
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_CALLED = {
    *((module, name) for module in ("builtins", "__builtin__") for name in ("bytes", "bytearray")),
    *((f"numpy.{core}.{module}", name) for core in ("core", "_core")
      for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))),
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
}  # fmt: skip
_DTYPES = {t.str[1:]: t for t in map(np.dtype, "?bBhHiIqQefd")}  # b1, i1, u1, ..., f8
_OBJECTS = "O8"
_FLAGS = {_OBJECTS: 63}  # of a dtype: how NumPy is to treat its objects


class Array:
    """An array of the file, filled by the operation after the one that makes it. content: the bytes of its numbers, or
    for an array of objects a list."""

    def __init__(self) -> None:
        self.dtype = ""
        self.shape: tuple[int, ...] = ()
        self.content: bytes | list[Any] = b""

    def set(self, dtype: Any, shape: Any, content: Any) -> None:
        if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
            raise ValueError("an array without dtype or shape")
        if not 1 <= len(shape) <= 2 or min(shape) < 0:
            raise ValueError(f"an array of {len(shape)} dimensions, expected 1 or 2")
        if dtype.name == _OBJECTS:
            if not isinstance(content, list) or shape != (len(content),):
                raise ValueError("an array of objects that are not as many as its shape says")
        elif not isinstance(content, bytes) or len(content) != math.prod(shape) * _DTYPES[dtype.name].itemsize:
            raise ValueError("an array that has not as many bytes as its shape says")
        self.dtype, self.shape, self.content = dtype.name, shape, content

    def value(self) -> NDArray[Any] | list[Any]:
        """Of the numbers a view, of objects the list. Raises ValueError for one that was never filled, or that NumPy
        cannot hold."""
        if not self.dtype:
            raise ValueError("an array that was never filled")
        if isinstance(self.content, list):
            return self.content
        return np.frombuffer(self.content, _DTYPES[self.dtype]).reshape(self.shape)


class _Dtype:
    def __init__(self, name: str) -> None:
        self.name = name


class _Name(NamedTuple):
    module: str
    name: str


def loads(content: bytes) -> Any:
    """The value; its arrays as `Array`, bytearrays as bytes. Raises ValueError for what is not a pickle of plain
    values."""
    try:
        return _Machine(content).run()
    except (LookupError, struct.error) as error:
        raise ValueError(f"damaged: {error}") from error


class _Machine:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}
        self.encoded: dict[int, tuple[str, bytes]] = {}  # by identity of the text, which is kept so that it stays one

    def run(self) -> Any:
        while True:
            start, code = self.at, self.take(1)
            if code == b".":
                return self.stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise ValueError(f"operation {code!r} at {start} does not occur in files of plain values")
            operation(self)

    # ---- what follows an operation ----

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.content) - self.at:
            left = len(self.content) - self.at
            raise ValueError(f"cut off or damaged: {count} bytes are announced at {self.at}, {left} follow")
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def counted(self, form: str) -> bytes:
        return self.take(self.number(form))

    def line(self) -> bytes:
        end = self.content.find(b"\n", self.at)
        if end < 0:
            raise ValueError(f"cut off: no end of the line that begins at {self.at}")
        line = self.take(end - self.at)
        self.at += 1
        return line

    # ---- operations ----

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def above_mark(self) -> list[Any]:
        above, self.stack = self.stack, self.marks.pop()
        return above

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError(f"values are appended to a {type(target).__name__}")
        target.extend(values)

    def put_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, (str, bytes, int)) for key in items[::2]):
            raise ValueError("a dict whose keys are neither text nor numbers")
        target.update(zip(items[::2], items[1::2], strict=True))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("a tuple of more values than there are")
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def ask(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str) and (module, name) in _CALLED):
            raise ValueError(
                f"it asks for {module!s:.99}.{name!s:.99}; such files hold lists, bytes, booleans and uint8 arrays "
                "only. Plain pickle would run it: use that only if you trust the author"
            )
        self.push(_Name(module, name))

    def call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, _Name) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no function")
        self.push(self.called(called.name, arguments))

    def called(self, name: str, arguments: tuple[Any, ...]) -> Any:
        match name, arguments:
            case "bytes" | "bytearray", ():
                return b""
            case "bytes" | "bytearray", (bytes() as value,):
                return value
            case "encode" | "bytearray", (str() as text, "latin1" | "latin-1"):
                # How Python 3 writes bytes with protocols below 3.
                return self.encoded.setdefault(id(text), (text, text.encode("latin1")))[1]
            case "dtype", (str() | bytes() as code, *_):
                text = code if isinstance(code, str) else code.decode("ascii")
                if text not in _DTYPES and text != _OBJECTS:
                    raise ValueError(f"arrays of dtype {text[:20]!r}; expected booleans or numbers")
                return _Dtype(text)
            case "_reconstruct", (_Name(name="ndarray"), *_):
                return Array()
            case "scalar", (_Dtype(name=dtype), bytes() as content) if dtype != _OBJECTS:
                if len(content) != _DTYPES[dtype].itemsize:
                    raise ValueError(f"a number of dtype {dtype} in {len(content)} bytes")
                return np.frombuffer(content, _DTYPES[dtype])[0].item()
            case "_frombuffer", (bytes() as content, dtype, shape, "C"):
                array = Array()
                array.set(dtype, shape, content)
                return array
        raise ValueError(f"{name} with arguments that are not those of plain values")

    def build(self) -> None:
        state = self.stack.pop()
        match self.stack[-1], state:
            case Array() as array, (_, shape, dtype, in_columns, content) if not in_columns:
                array.set(dtype, shape, content)
            case _Dtype(name=name), (_, order, None, None, None, -1, -1, flags) if flags == _FLAGS.get(name, 0):
                if order not in ("|", "<", b"|", b"<"):
                    raise ValueError("an array of numbers that are not little-endian")
            case _:
                raise ValueError("an array or dtype whose state is not that of plain numbers")


def _int_line(machine: _Machine) -> None:
    line = machine.line()
    machine.push(line == b"01" if line in (b"00", b"01") else int(line))


def _text_line(machine: _Machine) -> None:
    """Python 2's str: quoted, with escapes."""
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"'\"":
        raise ValueError("text without its quotes")
    machine.push(codecs.escape_decode(line[1:-1])[0])


def _pushing(read: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(read(machine))


def _ask_by_stack(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.ask(module, name)


def _dict_above_mark(machine: _Machine) -> None:
    items = machine.above_mark()
    machine.push({})
    machine.put_items(items)


def _two_items(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.put_items([key, value])


_OPERATIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # protocol
    b"\x95": lambda m: m.number("<Q"),  # a frame: how many bytes may be read ahead
    b"(": _Machine.mark,
    b"0": lambda m: m.stack.pop() if m.stack else m.above_mark(),
    b"1": _Machine.above_mark,
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"I": _int_line,
    b"J": _pushing(lambda m: m.number("<i")),
    b"K": _pushing(lambda m: m.number("<B")),
    b"M": _pushing(lambda m: m.number("<H")),
    b"L": _pushing(lambda m: int(m.line().removesuffix(b"L"))),
    b"\x8a": _pushing(lambda m: int.from_bytes(m.counted("<B"), "little", signed=True)),
    b"\x8b": _pushing(lambda m: int.from_bytes(m.counted("<i"), "little", signed=True)),
    b"F": _pushing(lambda m: float(m.line())),
    b"G": _pushing(lambda m: m.number(">d")),
    b"S": _text_line,  # these three: Python 2's str
    b"T": _pushing(lambda m: m.counted("<i")),
    b"U": _pushing(lambda m: m.counted("<B")),
    b"V": _pushing(lambda m: m.line().decode("raw-unicode-escape")),
    b"X": _pushing(lambda m: m.counted("<I").decode("utf-8", "surrogatepass")),
    b"\x8c": _pushing(lambda m: m.counted("<B").decode("utf-8", "surrogatepass")),
    b"\x8d": _pushing(lambda m: m.counted("<Q").decode("utf-8", "surrogatepass")),
    b"B": _pushing(lambda m: m.counted("<I")),
    b"C": _pushing(lambda m: m.counted("<B")),
    b"\x8e": _pushing(lambda m: m.counted("<Q")),
    b"\x96": _pushing(lambda m: m.counted("<Q")),  # a bytearray
    b"]": lambda m: m.push([]),
    b"l": _pushing(_Machine.above_mark),
    b"a": lambda m: m.extend([m.stack.pop()]),
    b"e": lambda m: m.extend(m.above_mark()),
    b")": lambda m: m.push(()),
    b"t": _pushing(lambda m: tuple(m.above_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"}": lambda m: m.push({}),
    b"d": _dict_above_mark,
    b"s": _two_items,
    b"u": lambda m: m.put_items(m.above_mark()),
    b"p": lambda m: m.put(int(m.line())),
    b"q": lambda m: m.put(m.number("<B")),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"g": _pushing(lambda m: m.memo[int(m.line())]),
    b"h": _pushing(lambda m: m.memo[m.number("<B")]),
    b"j": _pushing(lambda m: m.memo[m.number("<I")]),
    b"c": lambda m: m.ask(m.line().decode("utf-8"), m.line().decode("utf-8")),
    b"\x93": _ask_by_stack,
    b"R": _Machine.call,
    b"b": _Machine.build,
}
