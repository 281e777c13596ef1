"""Files that take the place of older ones at once, or not at all."""

import json
import math
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Into a new file that takes the old one's place at once."""
    partial = path.with_name(path.name + ".partial")
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, partial, metadata)
    os.replace(partial, path)


def write_json(value: Any, path: Path) -> None:
    """JSON, for people and scripts to read. NaN and infinity, which JSON does not have, become null."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(_finite(value), indent=2, default=str, allow_nan=False) + "\n")
    os.replace(partial, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
