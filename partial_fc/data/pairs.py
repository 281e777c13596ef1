"""Verification pairs in the .bin files of InsightFace (lfw.bin, agedb_30.bin ...).

A file is a pickle of (encoded images, issame): image files 2k and 2k + 1 are pair k. Loading a pickle can run any code,
and these files come from untrusted sources; restricted_pickle reads them.
"""

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.data import restricted_pickle
from partial_fc.data.sets.parquet import read_parquet_pairs
from partial_fc.file_kind import it_is
from partial_fc.files import read_bytes, replacing

_MOST_BYTES = 16 << 30


class Pairs(NamedTuple):
    """Image pairs. images: 2 P image files, pair k at 2 k and 2 k + 1. same: bool (P,), True for one person."""

    images: list[bytes]
    same: NDArray[np.bool_]


def write_pairs(path: str | os.PathLike[str], images: Sequence[bytes], same: Sequence[bool]) -> None:
    """Writes a file that InsightFace's own code reads with pickle.load(file, encoding="bytes")."""
    if len(images) != 2 * len(same):
        raise ValueError(f"{path}: got {len(images)} images for {len(same)} pairs, expected {2 * len(same)}")
    with replacing(Path(path)) as partial, partial.open("wb") as file:
        pickle.dump(([bytes(image) for image in images], [bool(value) for value in same]), file, protocol=4)


def read_pairs(path: str | os.PathLike[str]) -> Pairs:
    """Reads a .bin of any Python version, or a .parquet with the columns image1, image2 and label (1: one person).
    Raises ValueError, which names the file and the error."""
    path = Path(path)
    images: Any
    same: Any
    try:
        if path.suffix == ".parquet":
            images, same = read_parquet_pairs(path)
        else:
            content = restricted_pickle.loads(read_bytes(path, _MOST_BYTES))
            if not (isinstance(content, (tuple, list)) and len(content) == 2):
                raise ValueError(f"got a {type(content).__name__}, expected (list of images, list of issame)")
            images, same = (part.value if isinstance(part, restricted_pickle.Array) else part for part in content)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as a file of pairs: {error}{it_is(path)}") from error
    if not isinstance(images, (tuple, list, np.ndarray)) or not isinstance(same, (tuple, list, np.ndarray)):
        raise ValueError(f"{path}: got {type(images).__name__} and {type(same).__name__}, expected two lists")
    if len(images) != 2 * len(same) or len(same) == 0:
        raise ValueError(
            f"{path}: got {len(images)} images for {len(same)} pairs, expected twice as many, not 0: is it cut short? "
            "Copy it again"
        )
    values = same.ravel().tolist() if isinstance(same, np.ndarray) else same
    if len(values) != len(same) or not all(type(v) in (bool, int, float) and v in (0, 1) for v in values):
        shown = ", ".join(_shown(value) for value in values[:5])
        raise ValueError(f"{path}: issame holds [{shown}] ..., expected booleans only")
    flags = np.array(values, np.bool_)
    return Pairs([_image_bytes(path, i, image) for i, image in enumerate(images)], flags)


def _shown(value: Any) -> str:
    if type(value) in (bool, float) or (type(value) is int and abs(value) < 2**63):
        return repr(value)
    return type(value).__name__


def _image_bytes(path: str | os.PathLike[str], index: int, image: Any) -> bytes:
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, restricted_pickle.Array):
        image = image.value
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 1:
        return image.tobytes()
    raise ValueError(
        f"{path}, image {index} of pair {index // 2}: got {type(image).__name__}, expected a file as bytes"
    )
