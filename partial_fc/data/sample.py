"""A sample, the sources that give them, and the error for one that cannot be used."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

MAX_FILE_BYTES = 1 << 29  # of one image's file


class BadRecord(ValueError):
    """One sample cannot be used; the message names file, key, what was found and what was expected."""


class LabelOutOfRange(ValueError):
    """A sample's label is not below the number of classes: the number is wrong, not this one sample."""

    def __init__(self, message: str, label: int) -> None:
        super().__init__(message)
        self.label = label


@runtime_checkable
class Frames(Protocol):
    """A video, of which only the frames that are asked for are read."""

    def read(self, choose: Callable[[int], Sequence[int]]) -> Generator[tuple[int, NDArray[np.uint8]]]:
        """choose: how many frames there are -> the numbers, from 0, of those wanted. Gives (number, uint8 (H, W, 3)
        RGB) of each, once, ascending. Raises BadRecord."""
        ...


class Sample(NamedTuple):
    """data: whatever the transform takes: of a picture its file as bytes, pixels as uint8 (H, W, 3) RGB or (H, W, 1)
    grey, or the frames of a video. key: what error messages call it."""

    data: Any
    label: int
    key: int

    @property
    def image(self) -> bytes | NDArray[np.uint8] | Frames:
        """The data of a sample that is a picture."""
        return self.data


def still(sample: Sample) -> bytes | NDArray[np.uint8]:
    """The image file or the pixels. Raises BadRecord for a video."""
    # Asked of each image in turn; whether something is a protocol's takes longer.
    if isinstance(sample.image, bytes | np.ndarray):
        return sample.image
    raise BadRecord("a video; expected an image")


class Source(Protocol):
    """Samples 0 to len - 1 in a fixed order. Every method may be called from several threads at once. Those that have a
    body here are good enough for samples in memory, whose source may inherit them."""

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Raises BadRecord where this one sample is damaged, missing or wrongly labelled."""
        ...

    def where(self, index: int) -> str:
        """File and key, for messages."""
        return f"sample {index}"

    def will_need(self, indices: Sequence[int]) -> None:
        """A hint that these samples are read next."""
        return

    def labels(self) -> NDArray[np.int64] | None:
        """The labels of all samples, without reading the samples; None: they lie within these."""
        return None

    def class_names(self) -> list[str] | None:
        """The names of the classes, by label, perhaps of the first ones only; None: they have only numbers."""
        return None


@contextmanager
def naming(source: Source, index: int) -> Iterator[None]:
    """Puts file and key before the message of a BadRecord raised inside."""
    try:
        yield
    except BadRecord as error:
        raise BadRecord(f"{source.where(index)}: {error}") from None
