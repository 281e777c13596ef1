"""Files of a checkpoint, written atomically, synced to disk, with checksums."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_fc.files import TEXT_BYTES, about, check_regular, read_bytes, regular, replacing

if TYPE_CHECKING:
    from torch import Tensor

# As the safetensors format spells them: https://github.com/huggingface/safetensors#format
_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
_PIECE_BYTES = 8 << 20


def save_tensors(tensors: Mapping[str, "Tensor"], path: Path, metadata: Mapping[str, str] | None = None) -> str:
    """Writes a safetensors file; returns its SHA-256 in hex. Contiguous CPU tensors are not copied, others one at a
    time into one buffer, and most of the work does not block other threads. Raises OSError with the path."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    # The widest dtype first, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, t in ordered:
        begin, end = end, end + t.numel() * t.element_size()
        header[name] = {"dtype": _DTYPES[str(t.dtype)], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = memoryview(len(text).to_bytes(8, "little") + text)
    return write(path, chain((start,), _contents([t.detach() for _, t in ordered])))


def _contents(tensors: Sequence["Tensor"]) -> Iterator[memoryview]:
    """Yields the bytes of each tensor; those of non-contiguous or device tensors are valid until the next one.
    (The C library would keep the memory of copies: ten were seen at once.)"""
    import torch  # takes seconds, and a search for checkpoints does without

    lies_here = [t.is_contiguous() and t.device.type == "cpu" for t in tensors]
    most_bytes = max((t.nbytes for t, here in zip(tensors, lies_here, strict=True) if not here), default=0)
    buffer = torch.empty(most_bytes, dtype=torch.uint8)
    for t, here in zip(tensors, lies_here, strict=True):
        whole = t if here else buffer[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        yield memoryview(whole.reshape(-1).view(torch.uint8).numpy().data)


def load_tensors(path: Path) -> dict[str, "Tensor"]:
    """Returns all tensors of a safetensors file, memory-mapped. Raises ValueError for a damaged one; OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_regular(path)
    try:
        return load_file(path)
    except (SafetensorError, RuntimeError) as error:  # RuntimeError: torch's, if the disk fails
        raise ValueError(f"{path} is no safetensors file, or cut short: {error}") from error


def write(path: Path, contents: Iterable[memoryview | bytes]) -> str:
    """Writes a file atomically, synced, and returns its SHA-256 in hex. The folder must be synced (`sync_folder`)
    before the name is durable. Raises OSError with the path."""
    digest = hashlib.sha256()
    with replacing(path, durable=True) as partial, partial.open("wb", buffering=0) as file:
        for content in contents:
            for begin in range(0, len(content), _PIECE_BYTES):
                piece = memoryview(content)[begin : begin + _PIECE_BYTES]
                digest.update(piece)
                while piece:
                    piece = piece[file.write(piece) :]
    return digest.hexdigest()


def write_lines(lines: Iterable[str], path: Path) -> str:
    """Writes lines of text; returns the SHA-256."""
    rest = iter(lines)
    return write(path, iter(lambda: "".join(f"{line}\n" for line in islice(rest, 10_000)).encode(), b""))


def write_json(value: Any, path: Path) -> str:
    """Writes readable JSON; returns its SHA-256. NaN and infinity, which JSON lacks, become null."""
    return write(path, (as_json(value).encode(),))


def as_json(value: Any) -> str:
    """Returns the text that `write_json` writes."""
    return json.dumps(finite(value), indent=2, default=str, allow_nan=False) + "\n"


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's contents, in hex."""
    with about(path), open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_name(rank: int, world_size: int) -> str:
    """Returns the name of the file with the checksums of this rank's files."""
    return f"rank-{rank:05d}-of-{world_size:05d}.sha256"


def write_checksums(checksums: Mapping[str, str], path: Path) -> None:
    """Writes the list of checksums: file name -> SHA-256 in hex."""
    write(path, ("".join(f"{hexadecimal}  {name}\n" for name, hexadecimal in checksums.items()).encode(),))


def read_checksums(path: Path) -> dict[str, str]:
    """Reads file name -> SHA-256 in hex. Raises ValueError, with the line, for invalid files."""
    checksums = {}
    for number, line in enumerate(read_bytes(path, TEXT_BYTES).split(b"\n"), 1):
        if not line:
            continue
        hexadecimal, _, name = line.decode("utf-8", "replace").partition("  ")
        if len(hexadecimal) != 64 or not set(hexadecimal) <= set("0123456789abcdef") or not name or "/" in name:
            raise ValueError(f"{path}, line {number}: expected a SHA-256 in hex, two spaces and a file name")
        checksums[name] = hexadecimal
    return checksums


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
