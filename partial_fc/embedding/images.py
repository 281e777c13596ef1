"""Images as people have them -> pixels of the size that a network takes, some batches ahead of it."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc.data.decode import decode, fit
from partial_fc.data.sample import MAX_FILE_BYTES, BadRecord
from partial_fc.files import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

Pixels = NDArray[np.uint8]
# A file's path, its bytes, RGB pixels (H, W, 3), or an image of Pillow's.
Image = Union[str, os.PathLike[str], bytes, Pixels, "PilImage"]
T = TypeVar("T")
_BATCHES_AHEAD = 2


def is_one(images: object) -> bool:
    """Whether it is one image, and not several."""
    if isinstance(images, np.ndarray):
        return images.ndim < 4
    return isinstance(images, str | os.PathLike | bytes) or _is_pil(images)


def pixels_of(image: Image) -> Pixels:
    """uint8 RGB (H, W, 3). Raises BadRecord for one that cannot be used, TypeError for what is no image."""
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

        # As files are read: turned as their Exif says, alpha dropped.
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    raise TypeError(
        f"{type(image).__module__}.{type(image).__name__} is no image; expected a path, a file's bytes, an array of "
        "uint8 (height, width, 3) or an image of Pillow's"
    )


def _is_pil(image: object) -> bool:
    # Who has one has imported Pillow.
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(image, pil.Image)


def name_of(image: object, number: int) -> str:
    """What messages call it; number: from 0, among those given."""
    return f"image {number}{f', {os.fspath(image)}' if isinstance(image, str | os.PathLike) else ''}"


def batches(
    items: Iterable[T], read: Callable[[T], Pixels], size: int, batch_size: int, num_threads: int | None = None
) -> Iterator[tuple[Tensor, dict[int, BadRecord]]]:
    """Batches of the items' images as the network takes them, uint8 (I, 3, size, size), and by their places which of
    them cannot be used, and why (black there). read: an item -> its pixels, in several threads while the network works
    on the batches before; num_threads: None: as many as there are cores, at most 4."""
    left = iter(items)
    ahead: deque[list[Future[Pixels]]] = deque()
    pool = ThreadPoolExecutor(num_threads or min(4, len(os.sched_getaffinity(0))))
    try:
        while True:
            while len(ahead) <= _BATCHES_AHEAD and (batch := list(islice(left, batch_size))):
                ahead.append([pool.submit(lambda item: fit(read(item), size), item) for item in batch])
            if not ahead:
                return
            yield _batch(ahead.popleft(), size)
    finally:
        pool.shutdown(cancel_futures=True)


def _batch(read: list[Future[Pixels]], size: int) -> tuple[Tensor, dict[int, BadRecord]]:
    image_IHW3 = np.zeros((len(read), size, size, 3), np.uint8)
    bad: dict[int, BadRecord] = {}
    for i, future in enumerate(read):
        try:
            image_IHW3[i] = future.result()
        except BadRecord as error:
            bad[i] = error
    return torch.from_numpy(image_IHW3).permute(0, 3, 1, 2).contiguous(), bad
