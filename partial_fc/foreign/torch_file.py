"""Files of torch.save that others wrote: tensors and plain values only, and no more memory than the file has bytes.

torch.load's weights_only runs no code. Beyond that this refuses what torch.load would believe: sizes that a file
announces and does not have, and tensors that repeat few stored numbers (stride 0), which a copy would unfold. Files of
the time before torch 1.6 may make torch ask for more memory than they have bytes; it is never filled.
"""

import io
import mmap
import pickle
import re
import tarfile
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partial_fc.files import regular

_ZIP = b"PK\x03\x04"
_BOLD = re.compile(r"\x1b\[\d*m")  # in messages of torch
_CODE = re.compile(r"GLOBAL (\S{1,200}) was not an allowed")  # likewise
_MOST_SEARCHED = 2000  # characters


class _Searching:
    """The module `re` as torch.serialization sees it: looks at the beginning of a text.

    torch.load searches its messages for what they mean, in a time that grows with the square of the longest word, which
    can be a name in the file: hours for a megabyte."""

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def search(self, pattern: str, text: str) -> re.Match[str] | None:
        return re.search(pattern, text[:_MOST_SEARCHED])


setattr(torch.serialization, "re", _Searching())  # noqa: B010  # mypy knows no such name there


def load(path: str | Path) -> Any:
    """What the file holds, on the CPU. Raises ValueError, which names the file, for one that is damaged or holds
    anything but tensors and plain values; OSError as open does."""
    path = Path(path)
    with _BoundedFile(path) as file:
        try:
            _check_calls(file)
            if file.peek(4)[:4] == _ZIP:
                _check_sizes(file)
                found = torch.load(path, map_location="cpu", weights_only=True)
            else:  # as torch wrote before version 1.6
                _check_no_tar(file)
                found = torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # damaged files make torch's unpickler raise nearly anything
            raise ValueError(f"{path} cannot be read as tensors and plain values: {_reason(error)}") from error
    _check_tensors(path, found)
    return found


def _reason(error: Exception) -> str:
    """Why a file is not read. Of torch's own words neither the advice to run what is in the file, nor its beginning,
    which says no more than that."""
    words = _BOLD.sub("", str(error)[:_MOST_SEARCHED])
    if asked := _CODE.search(words):
        return (
            f"it asks for {asked[1]}, which is code, and a file's code is not run; save state dicts, not whole models: "
            "torch.save(model.state_dict(), FILE)"
        )
    if isinstance(error, pickle.UnpicklingError):
        return "it holds other things, or is damaged; save state dicts, not whole models"
    line = words.strip().partition("\n")[0] or type(error).__name__
    return f"{textwrap.shorten(line, 300, placeholder=' ...')} (save state dicts, not whole models)"


class _BoundedFile(io.BufferedReader):
    """A read takes memory for what the file still has, not for what is asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, opener=regular))
        self._size = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def _check_calls(file: _BoundedFile) -> None:
    """Refuses a bytearray: of what weights_only calls, it alone takes memory that a number in the file says. No state
    dict has one; fuzzing found it."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"\nbytearray\n") >= 0:
            raise ValueError("a bytearray, which is no part of a state dict")


def _check_no_tar(file: _BoundedFile) -> None:
    """Refuses files of the time before torch 0.1.10, for which torch makes a folder, and advises to load it as a
    program."""
    try:
        tarfile.open(fileobj=file, mode="r:").close()
    except tarfile.TarError:
        file.seek(0)
        return
    raise ValueError("a tar file, as torch wrote before version 0.1.10; save it again with a later one")


def _check_sizes(file: _BoundedFile) -> None:
    """Refuses compressed files: torch.save writes none, and what is compressed, or overlaps, can be many times the
    file."""
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size for part in parts):
        raise ValueError("compressed parts, which torch.save does not write")
    if sum(part.file_size for part in parts) > file.seek(0, io.SEEK_END):
        raise ValueError("its parts are larger than the file")


def _check_tensors(path: Path, found: Any) -> None:
    left, seen = [found], set()
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
            if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise ValueError(
                    f"{path}: a tensor of shape {tuple(value.shape)} that is sparse, quantised, or repeats few stored "
                    "numbers; save plain ones (t.contiguous())"
                )
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, dict) else value)
