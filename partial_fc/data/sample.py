"""A sample, the sources that give them, and the error for one that cannot be used."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class BadRecord(ValueError):
    """One sample cannot be used; the message names file, key, what was found and what was expected."""


class LabelOutOfRange(ValueError):
    """A sample's label is not below the number of classes: the number is wrong, not this one sample."""

    def __init__(self, message: str, label: int) -> None:
        super().__init__(message)
        self.label = label


class Sample(NamedTuple):
    """image: an image file as bytes, or pixels as uint8 (H, W, 3) RGB or (H, W, 1) grey. key: what error messages call
    it."""

    image: bytes | NDArray[np.uint8]
    label: int
    key: int


class Source(Protocol):
    """Samples 0 to len - 1 in a fixed order. Every method may be called from several threads at once."""

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Raises BadRecord where this one sample is damaged, missing or wrongly labelled."""
        ...

    def where(self, index: int) -> str:
        """File and key, for messages."""
        ...

    def will_need(self, indices: Sequence[int]) -> None:
        """A hint that these samples are read next."""
        ...

    def labels(self) -> NDArray[np.int64] | None:
        """The labels of all samples, without reading images; None: they lie within the images' records."""
        ...

    def class_names(self) -> list[str] | None:
        """The names of the classes, by label, perhaps of the first ones only; None: they have only numbers."""
        ...


@contextmanager
def naming(source: Source, index: int) -> Iterator[None]:
    """Puts file and key before the message of a BadRecord raised inside."""
    try:
        yield
    except BadRecord as error:
        raise BadRecord(f"{source.where(index)}: {error}") from None
