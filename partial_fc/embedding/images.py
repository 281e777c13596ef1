"""User images -> pixels of the network's input size, read some batches ahead."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc.accessories import threads
from partial_fc.data.decode import decode
from partial_fc.data.sample import MAX_FILE_BYTES, BadRecord
from partial_fc.files import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

Pixels = NDArray[np.uint8]
# A file's path, its bytes, RGB pixels (H, W, 3), or a Pillow image.
Image = Union[str, os.PathLike[str], bytes, Pixels, "PilImage"]
T = TypeVar("T")
_BATCHES_AHEAD = 2


def is_one(images: object) -> bool:
    """Tells a single image from several."""
    if isinstance(images, np.ndarray):
        return images.ndim < 4
    return isinstance(images, str | os.PathLike | bytes) or _is_pil(images)


def pixels_of(image: Image) -> Pixels:
    """Returns uint8 RGB (H, W, 3). Raises BadRecord for an unusable image, TypeError for anything else."""
    if isinstance(image, bytes):
        return decode(image)
    if isinstance(image, str | os.PathLike):
        try:
            return decode(read_bytes(image, MAX_FILE_BYTES))
        except OSError as error:
            raise BadRecord(error.strerror or str(error)) from None
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise BadRecord(f"an array of {image.dtype} {image.shape}; expected uint8 (height, width, 3), RGB")
        return image
    if _is_pil(image):
        from PIL import ImageOps

        # As for files: Exif orientation applied, alpha dropped.
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    raise TypeError(
        f"{type(image).__module__}.{type(image).__name__} is no image; expected a path, a file's bytes, an array of "
        "uint8 (height, width, 3) or an image of Pillow's"
    )


def _is_pil(image: object) -> bool:
    # A Pillow image exists only if Pillow is imported.
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(image, pil.Image)


def name_of(image: object, number: int) -> str:
    """Returns the image's name for messages; number: its index, from 0."""
    return f"image {number}{f', {os.fspath(image)}' if isinstance(image, str | os.PathLike) else ''}"


def black(size: int) -> Pixels:
    return np.zeros((size, size, 3), np.uint8)


def batches(
    items: Iterable[T], read: Callable[[T], NDArray], blank: NDArray, batch_size: int, num_threads: int | None = None
) -> Iterator[tuple[Tensor, dict[int, BadRecord]]]:
    """Yields batches of the items' arrays, images as (I, 3, H, W), and the unusable ones by index, with the error.
    read: item -> an array like `blank`, which stands for unusable ones; called by several threads while the network
    computes earlier batches; num_threads: None: as many as cores, at most 4."""
    left = iter(items)
    ahead: deque[list[Future[NDArray]]] = deque()
    pool = threads(num_threads or min(4, len(os.sched_getaffinity(0))), "images")
    try:
        while True:
            while len(ahead) <= _BATCHES_AHEAD and (batch := list(islice(left, batch_size))):
                ahead.append([pool.submit(read, item) for item in batch])
            if not ahead:
                return
            yield _batch(ahead.popleft(), blank)
    finally:
        pool.shutdown(cancel_futures=True)


def _batch(read: list[Future[NDArray]], blank: NDArray) -> tuple[Tensor, dict[int, BadRecord]]:
    array_I = np.stack([blank] * len(read))
    bad: dict[int, BadRecord] = {}
    for i, future in enumerate(read):
        try:
            array_I[i] = future.result()
        except BadRecord as error:
            bad[i] = error
    data_I = torch.from_numpy(array_I)
    return data_I.permute(0, 3, 1, 2).contiguous() if data_I.ndim == 4 else data_I, bad
