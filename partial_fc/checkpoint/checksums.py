"""The checksums of a checkpoint's files, in the form that `sha256sum -c` reads."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from partial_fc.checkpoint.files import sha256, write


def checksums_name(rank: int, world_size: int) -> str:
    """The file with the checksums of what this rank wrote."""
    return f"rank-{rank:05d}-of-{world_size:05d}.sha256"


def write_checksums(checksums: Mapping[str, str], path: Path) -> None:
    """checksums: file name -> SHA-256 in hex."""
    write(path, ("".join(f"{hexadecimal}  {name}\n" for name, hexadecimal in checksums.items()).encode(),))


class Checksums:
    """The checksums of all ranks' files in a folder; each file is compared with its own once, before anything of it is
    used."""

    def __init__(self, folder: Path, world_size: int):
        """Raises ValueError where a line holds no checksum."""
        self._expected: dict[str, str] = {}
        self._checked: set[Path] = set()
        self._has_lists = False
        for path in sorted(folder.glob(f"rank-*-of-{world_size:05d}.sha256")):
            self._has_lists = True
            self._expected |= read_checksums(path)

    def __getitem__(self, name: str) -> str | None:
        return self._expected.get(name)

    def check(self, path: Path) -> None:
        """Raises ValueError where the file is not there, or not what was written."""
        if not path.exists():
            raise ValueError(
                f"{path} is missing. Where each host has a folder of its own for checkpoints, copy the files of all of "
                "them into this folder"
            )
        if self._has_lists and path not in self._checked:  # the format before had no checksums
            expected = self._expected.get(path.name)
            if expected is None:
                raise ValueError(f"{path} is in no list of checksums beside it (rank-*.sha256): not of this checkpoint")
            actual = sha256(path)
            if actual != expected:
                raise ValueError(
                    f"{path} is damaged: its SHA-256 is {actual[:16]}..., expected {expected[:16]}... Go on from an "
                    "older checkpoint (--resume DIR; `partial-fc checkpoint verify` tells which are whole), or bring "
                    "this file back from a copy"
                )
        self._checked.add(path)

    def load(self, path: Path) -> dict[str, Tensor]:
        """All tensors of a file. Raises ValueError as `check` does, and for what is no safetensors file."""
        self.check(path)
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file, or cut short: {error}") from error


def read_checksums(path: Path) -> dict[str, str]:
    """File name -> SHA-256 in hex. Raises ValueError, with the line, for anything else."""
    checksums = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        hexadecimal, _, name = line.decode("utf-8", "replace").partition("  ")
        if len(hexadecimal) != 64 or not set(hexadecimal) <= set("0123456789abcdef") or not name or "/" in name:
            raise ValueError(f"{path}, line {number}: expected a SHA-256 in hex, two spaces and a file name")
        checksums[name] = hexadecimal
    return checksums
