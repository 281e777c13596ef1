"""Changes valid files in the ways that break readers: numbers at their limits, parts cut, doubled and moved, and words
of the format in the wrong place. All randomness comes from the generator that is given."""

import gzip
import io
import json
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]

_LIMITS = [0, 1, 2, 3, 7, 8, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**24, 2**29 - 1, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1]
_LIMITS += [2**32, 2**53 + 1, 2**62, 2**63 - 4, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
_FLOATS = [float("nan"), float("inf"), -float("inf"), 1e30, -1.0, 0.5, 1e-40]
_TEXTS = [
    b"nan",
    b"inf",
    b"-1",
    b"0",
    b"1e30",
    b"1e999",
    b"0x10",
    b"99999999999999999999",
    b"9223372036854775807",
    b"1_0",
]
_TEXTS += [
    b"9" * 5000,
    b"\x00",
    b"\xff\xfe",
    b"\n",
    b"\r",
    b"\t",
    b" ",
    b",",
    b"../../x",
    "é".encode(),
    b"\x0c",
    b"[" * 3000,
]
_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    0.5,
    2**31,
    2**63,
    10**30,
    1e300,
    "",
    "x",
    "\x00",
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
]


def mutate(data: bytes, random: Random, words: Sequence[bytes] = (), inside: Sequence[Mutation] = ()) -> bytes:
    """data after one to four changes. words: of the format. inside: changes that keep what holds the content together
    (checksums, lengths, compression) in order, so that what is changed is read at all."""
    for _ in range(random.choice((1, 1, 2, 4))):
        if inside and random.random() < 0.6:
            data = random.choice(inside)(data, random)
        else:
            data = _change(data, random, words)
    return data


def _change(data: bytes, random: Random, words: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    length = random.choice((1, 2, 4, 8, random.randrange(len(data) + 1)))
    match random.randrange(11):
        case 0:
            return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[at + length :]
        case 3:
            return data[:at] + data[at : at + length] * random.choice((2, 3, 50)) + data[at + length :]
        case 4:
            to = random.randrange(len(data) + 1)
            return data[:to] + data[at : at + length] + data[to:]
        case 5 | 6:
            number = _number(random)
            return data[:at] + number + data[at + len(number) :]
        case 7:  # numbers mostly stand at multiples of 4
            number = _number(random)
            return data[: at - at % 4] + number + data[at - at % 4 + len(number) :]
        case 8:
            return data[:at] + random.choice((*_TEXTS, *words)) + data[at:]
        case 9:
            return _other_number_in_text(data, random)
        case _:
            word = random.choice((*words, *_TEXTS[:10]))
            return data[:at] + word + data[at + len(word) :]


def _number(random: Random) -> bytes:
    order = random.choice("<>")
    if random.random() < 0.2:
        return struct.pack(f"{order}f", random.choice(_FLOATS))
    size = random.choice("BHIQ")
    bits = 8 * struct.calcsize(size)
    return struct.pack(order + size, random.choice(_LIMITS) % 2**bits)


def _other_number_in_text(data: bytes, random: Random) -> bytes:
    digits = [i for i in range(len(data)) if data[i : i + 1].isdigit() and not data[i - 1 : i].isdigit()][:5000]
    if not digits:
        return data
    start = end = random.choice(digits)
    while data[end : end + 1].isdigit():
        end += 1
    return data[:start] + random.choice([*_TEXTS[:10], str(random.choice(_LIMITS)).encode()]) + data[end:]


def in_gzip(data: bytes, random: Random) -> bytes:
    try:
        return gzip.compress(_change(gzip.decompress(data), random, ()), compresslevel=1, mtime=0)
    except (OSError, EOFError, zlib.error):
        return data


def in_png(data: bytes, random: Random) -> bytes:
    """One chunk's content, with the checksum as it then is."""
    at, chunks = 8, []
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        chunks.append((at, end))
        at = end
    if not chunks or not data.startswith(b"\x89PNG"):
        return data
    begin, end = random.choice(chunks)
    content = _change(data[begin + 4 : end - 4], random, (b"acTL", b"fcTL", b"PLTE", b"tRNS", b"eXIf", b"iCCP"))
    chunk = struct.pack(">I", max(0, len(content) - 4)) + content + struct.pack(">I", zlib.crc32(content))
    return data[:begin] + chunk + data[end:]


def in_scans(data: bytes, random: Random) -> bytes:
    """A scan of a JPEG many times more, and perhaps many more pixels: each scan passes over all of them."""
    starts = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    if not data.startswith(b"\xff\xd8") or not starts or frame < 0:
        return data
    at = random.choice(starts)
    end = next((i for i in starts if i > at), data.rfind(b"\xff\xd9"))
    data = data[:end] + data[at:end] * random.choice((1, 10, 60, 1000)) + data[end:]
    if random.random() < 0.5:
        sides = struct.pack(">HH", *(random.choice((16, 500, 2000, 4000, 9000)) for _ in range(2)))
        data = data[: frame + 5] + sides + data[frame + 9 :]
    return data


def in_json(data: bytes, random: Random) -> bytes:
    """Another value, or none, in place of one of a JSON text."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places = list(_places(value))
    if not places:
        return data
    holder, key = random.choice(places)
    if random.random() < 0.25:
        del holder[key]
    else:
        holder[key] = random.choice(_VALUES)
    return json.dumps(value).encode()


def _places(value: Any) -> Any:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def in_safetensors_header(data: bytes, random: Random) -> bytes:
    """Its JSON header with another value, and the length before it as it then is."""
    length = int.from_bytes(data[:8], "little")
    header = in_json(data[8 : 8 + length], random)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def in_pickle(data: bytes, random: Random) -> bytes:
    """Its operations in another order, doubled, left out, or with some of a file that would run code."""
    pieces = _operations(data)
    if len(pieces) < 2:
        return data
    at, to = random.randrange(len(pieces)), random.randrange(len(pieces))
    match random.randrange(5):
        case 0:
            del pieces[at]
        case 1:
            pieces.insert(to, pieces[at])
        case 2:
            pieces[at], pieces[to] = pieces[to], pieces[at]
        case 3:
            pieces[at] = random.choice(pieces)
        case _:
            pieces.insert(at, random.choice(PICKLE_WORDS))
    return b"".join(pieces)


def _operations(data: bytes) -> list[bytes]:
    starts = []
    try:
        for _, _, position in pickletools.genops(data):
            starts.append(position)
    except (ValueError, UnicodeDecodeError, struct.error, AttributeError):
        pass  # up to where it can be read
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=False)]


_MOST = b"\xff\xff\xff\x7f"
PICKLE_WORDS = [
    b"cos\nsystem\n", b"cposix\nmkdir\n", b"cbuiltins\nexec\n", b"iposix\nsystem\n", b"X\x03\x00\x00\x00pwn",
    b"(X\x0a\x00\x00\x00touch pwned\x85R", b"cbuiltins\nbytes\nK\x05\x85R",
    *(b"cbuiltins\n" + name + b"\nJ" + _MOST + b"\x85R" for name in (b"bytes", b"bytearray")),
    b"cnumpy\nndarray\nJ" + _MOST + b"\x85\x85R", b"cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R",
    b"r\xff\xff\xff\xff", *(code + b"\xff\xff\xff\xff\x00\x00\x00\x00" for code in (b"\x8e", b"\x96")),
    b"\x95\xff\xff\xff\xff" + _MOST, b"T" + _MOST, b"\x8b" + _MOST, b"F1e999\n", b"L" + b"9" * 5000 + b"L\n",
    b"Pid\n", b"Q", b"h\x00", b"\x94", b"(K\x01l2\x86", b"\x85R", b"R", b"b", b"o", b"\x81", b"2", b"0", b"1", b"(",
    b"e", b"a", b"u", b"}", b"]", b"N",
]  # fmt: skip


def in_zip(mutation: Mutation) -> Mutation:
    """The same for one file of a zip archive, as torch.save writes: without compression."""

    def change(data: bytes, random: Random) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
        except (
            zipfile.BadZipFile,
            ValueError,
            OSError,
            EOFError,
            KeyError,
            NotImplementedError,
            RuntimeError,
            zlib.error,
        ):
            return data
        if not files:
            return data
        name = random.choice([*(name for name in files if name.endswith(".pkl")), random.choice(list(files))])
        files[name] = mutation(files[name], random)
        out = io.BytesIO()
        with zipfile.ZipFile(
            out, "w", zipfile.ZIP_DEFLATED if random.random() < 0.1 else zipfile.ZIP_STORED
        ) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return out.getvalue()

    return change


def any_bytes(data: bytes, random: Random) -> bytes:
    return _change(data, random, ())
