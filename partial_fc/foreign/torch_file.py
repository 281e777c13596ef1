"""Safe loader of torch.save files: tensors and plain values only."""

import pickle
import re
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partial_fc.files import check_regular

_CODE = re.compile(r"GLOBAL (\S{1,200}) was not an allowed")  # in torch's messages
_MOST_SEARCHED = 2000  # characters


def load(path: str | Path) -> Any:
    """Loads a file onto the CPU; since torch 1.6 tensors are read on use. Raises ValueError, which names the file, for
    damage or anything but tensors and plain values; OSError as open does."""
    check_regular(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch's unpickler raises nearly any error for damaged files
        raise ValueError(f"{path} cannot be read as tensors and plain values: {_reason(error)}") from error
    _check_tensors(path, found)
    return found


def _reason(error: Exception) -> str:
    """Returns why a file is rejected: torch's message without preamble and advice to run the file's code."""
    words = re.sub(r"\x1b\[\d*m", "", str(error)[:_MOST_SEARCHED])
    if asked := _CODE.search(words):
        return (
            f"it asks for {asked[1]}, which is code, and a file's code is not run; save state dicts, not whole models: "
            "torch.save(model.state_dict(), FILE)"
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in words:
        return "it holds other things, or is damaged; save state dicts, not whole models"
    line = words.strip().partition("\n")[0] or type(error).__name__
    return f"{textwrap.shorten(line, 300, placeholder=' ...')} (save state dicts, not whole models)"


def _check_tensors(path: str | Path, found: Any) -> None:
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
