"""The checksums of a checkpoint's files, in the form that `sha256sum -c` reads."""

from collections.abc import Mapping
from pathlib import Path

from partial_fc.checkpoint.files import write
from partial_fc.files import TEXT_BYTES, read_bytes


def checksums_name(rank: int, world_size: int) -> str:
    """The file with the checksums of what this rank wrote."""
    return f"rank-{rank:05d}-of-{world_size:05d}.sha256"


def write_checksums(checksums: Mapping[str, str], path: Path) -> None:
    """checksums: file name -> SHA-256 in hex."""
    write(path, ("".join(f"{hexadecimal}  {name}\n" for name, hexadecimal in checksums.items()).encode(),))


def read_checksums(path: Path) -> dict[str, str]:
    """File name -> SHA-256 in hex. Raises ValueError, with the line, for anything else."""
    checksums = {}
    for number, line in enumerate(read_bytes(path, TEXT_BYTES).split(b"\n"), 1):
        if not line:
            continue
        hexadecimal, _, name = line.decode("utf-8", "replace").partition("  ")
        if len(hexadecimal) != 64 or not set(hexadecimal) <= set("0123456789abcdef") or not name or "/" in name:
            raise ValueError(f"{path}, line {number}: expected a SHA-256 in hex, two spaces and a file name")
        checksums[name] = hexadecimal
    return checksums
