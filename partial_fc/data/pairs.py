"""Verification pairs in the .bin files of InsightFace (lfw.bin, agedb_30.bin ...).

Such a file is a pickle of (encoded images, issame): image files 2k and 2k + 1 are pair k. A pickle can run
any code when it is loaded, and these files are passed around; so they are read by an unpickler that knows the
few types such files consist of and refuses everything else.
"""

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Pairs(NamedTuple):
    """images: 2 P image files, those of pair k at 2 k and 2 k + 1. same: bool (P,), one person or two."""

    images: list[bytes]
    same: NDArray[np.bool_]


def write_pairs(path: str | os.PathLike[str], images: Sequence[bytes], same: Sequence[bool]) -> None:
    """Writes what InsightFace's own code reads with pickle.load(file, encoding="bytes")."""
    if len(images) != 2 * len(same):
        raise ValueError(f"{path}: got {len(images)} images for {len(same)} pairs, expected {2 * len(same)}")
    unfinished = Path(f"{path}.unfinished")
    with open(unfinished, "wb") as file:
        pickle.dump(([bytes(image) for image in images], [bool(value) for value in same]), file, protocol=4)
    os.replace(unfinished, path)


def read_pairs(path: str | os.PathLike[str]) -> Pairs:
    """Reads a .bin written by any Python. ValueError names the file and what is wrong with it."""
    with open(path, "rb") as file:
        try:
            content = _PairsUnpickler(file, encoding="bytes").load()
        except (
            pickle.UnpicklingError,
            EOFError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"{path} cannot be read as a file of pairs: {error}") from error
    if not (isinstance(content, (tuple, list)) and len(content) == 2):
        raise ValueError(f"{path}: got a {type(content).__name__}, expected (list of images, list of issame)")
    images, same = content
    if not isinstance(images, (tuple, list, np.ndarray)) or not isinstance(same, (tuple, list, np.ndarray)):
        raise ValueError(f"{path}: got {type(images).__name__} and {type(same).__name__}, expected two lists")
    if len(images) != 2 * len(same) or len(same) == 0:
        raise ValueError(
            f"{path}: got {len(images)} images for {len(same)} pairs, expected twice as many, not 0"
        )
    flags = np.asarray(same)
    if flags.ndim != 1 or flags.dtype.kind not in "biuf" or not np.isin(flags, (0, 1)).all():
        raise ValueError(f"{path}: issame holds {flags.ravel()[:5].tolist()} ..., expected booleans only")
    return Pairs([_image_bytes(path, i, image) for i, image in enumerate(images)], flags.astype(np.bool_))


def _image_bytes(path: str | os.PathLike[str], index: int, image: Any) -> bytes:
    if isinstance(image, (bytes, bytearray)):
        return bytes(image)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 1:
        return image.tobytes()
    raise ValueError(
        f"{path}, image {index} of pair {index // 2}: got {type(image).__name__}, expected a file as bytes"
    )


class _PairsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}; such files hold lists, bytes, booleans and uint8 arrays only. "
                f"Plain pickle would run it: use that only if you trust the author"
            )
        return found


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """How Python 3 writes bytes with pickle protocols below 3."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}, expected latin1")
    return text.encode("latin1")


# NumPy's own helpers, taken from what it would write, because their module has moved between its versions.
_reconstruct = np.empty(0).__reduce__()[0]
_from_buffer = np.empty(0).__reduce_ex__(5)[0]
_scalar = np.bool_(True).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _latin1,
    ("__builtin__", "bytes"): bytes,
    ("builtins", "bytes"): bytes,
    ("__builtin__", "bytearray"): bytearray,
    ("builtins", "bytearray"): bytearray,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
}
