"""A sample, the interface of sources, and the error for an unusable sample."""

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

MAX_FILE_BYTES = 1 << 29  # of one image's file


class BadRecord(ValueError):
    """An unusable sample; the message names file, key, what was found and what was expected."""


class SourceGone(OSError):
    """Samples cannot be read any more, though nothing is wrong with them: their server is unreachable."""


class SourceRefused(ValueError):
    """A server answers, but not with what is asked for: an error at the start, later perhaps for a while only."""


class LabelOutOfRange(ValueError):
    """A sample's label is not below the number of classes: the number is wrong, not this sample. label: that number;
    labels.WRONG if the sample has no label, or more of them than were asked for."""

    def __init__(self, message: str, label: int) -> None:
        super().__init__(message)
        self.label = label

    def __reduce__(self) -> tuple[Any, ...]:
        return LabelOutOfRange, (str(self), self.label)


@runtime_checkable
class Frames(Protocol):
    """A video, of which only the requested frames are read."""

    def read(self, choose: Callable[[int], Sequence[int]]) -> Generator[tuple[int, NDArray[np.uint8]]]:
        """Yields (number, uint8 (H, W, 3) RGB) of each chosen frame, once, ascending. choose: number of frames ->
        wanted numbers, from 0. Raises BadRecord."""
        ...


class Sample(NamedTuple):
    """One input. data: whatever the transform takes: the bytes of an image file, pixels as uint8 (H, W, 3) RGB or (H,
    W, 1) grey, or the frames of a video. key: its name in error messages. more: further labels, of a source with
    num_labels above 1."""

    data: Any
    label: int
    key: int
    more: tuple[int, ...] = ()

    @property
    def image(self) -> bytes | NDArray[np.uint8] | Frames:
        """Returns the data of a sample that is a picture."""
        return self.data


def still(sample: Sample) -> bytes | NDArray[np.uint8]:
    """Returns the image file or the pixels. Raises BadRecord for a video."""
    # Called for every image; an isinstance check of a protocol is slower.
    if isinstance(sample.data, bytes | np.ndarray):
        return sample.data
    raise BadRecord("a video; expected an image")


class Source(Protocol):
    """Samples 0 to len - 1 in a fixed order. Every method is safe to call from several threads at once. The default
    methods suit samples in memory; sources may inherit them. remote: reading may raise SourceGone. num_labels: the most
    labels of a sample, K; with 1 only its first counts, whatever the file has (labels.py). alike: all samples have the
    same data, and differ in labels."""

    num_classes: int
    remote: bool = False
    num_labels: int = 1
    alike: bool = False

    def __new__(cls, *args: Any, **named: Any) -> Self:
        self = super().__new__(cls)
        vars(self)["_opened"] = partial(cls, *args, **named)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is opened again."""
        return vars(self)["_opened"], ()

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Reads a sample. Raises BadRecord if it is damaged, missing or wrongly labelled."""
        ...

    def read_batch(self, index_B: NDArray[np.int64]) -> tuple[NDArray, NDArray[np.int64], NDArray[np.int64]] | None:
        """Reads samples at once: (their arrays, stacked, labels, keys); None: one is unusable, or the source reads them
        singly. For loaders with the transform `as_stored`."""
        return None

    def where(self, index: int) -> str:
        """Returns file and key, for messages."""
        return f"sample {index}"

    def key(self, index: int) -> str:
        """Returns its name in tables: its path in the folder or list, its number in a .rec."""
        return str(index)

    def will_need(self, indices: Sequence[int]) -> None:
        """Hints that these samples are read next."""
        return

    def labels(self) -> NDArray[np.int64] | None:
        """Returns the labels of all samples, (N,), or (N, K) with labels.NONE where one has fewer, without reading
        these; None: the labels are inside the samples."""
        return None

    def label_bytes(self) -> int:
        """Returns the size of what `labels` reads; 0: the labels are at hand."""
        return 0

    def layout(self) -> Iterator[NDArray[Any] | bytes]:
        """Yields what tells which samples these are, and in which order, as far as it is at hand: keys, labels, places
        in the file. By default labels that need no reading."""
        if self.label_bytes() == 0 and (label_N := self.labels()) is not None:
            yield label_N

    def set_of(self, index_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of the set that each of these samples is of, if there are several."""
        return np.zeros_like(index_N)

    def class_names(self) -> list[str] | None:
        """Returns the class names by label, perhaps of the first classes only; None: classes are numbers."""
        return None

    def close(self) -> None:
        return


def identity(source: Source) -> dict[str, int]:
    """Returns the number of samples, and a CRC-32 of `layout`, which no image is read for: of 42 million records of a
    .rec 0.2 s, as many paths 22 s."""
    crc = 0
    for part in source.layout() if hasattr(source, "layout") else ():
        crc = zlib.crc32(part if isinstance(part, bytes) else np.ascontiguousarray(part).view(np.uint8).data, crc)
    return {"samples": len(source), "crc32": crc}


@contextmanager
def naming(source: Source, index: int) -> Iterator[None]:
    """Prefixes the message of a BadRecord raised inside with file and key."""
    try:
        yield
    except BadRecord as error:
        raise BadRecord(f"{source.where(index)}: {error}") from None


class Synthetic(Source):
    """Data without reading images, to find out whether input is the bottleneck: one random image for every sample, of
    which the loader makes a batch once. Sample i has label i % num_classes, and further ones spread over the classes.

    The loader's keyed permutation shuffles the labels, so they need no randomness of their own, and every class occurs.
    100 million classes need no more memory than ten.
    """

    alike = True

    def __init__(
        self, num_classes: int, image_size: int = 112, num_samples: int | None = None, num_labels: int = 1
    ) -> None:
        self.num_classes, self.num_labels = num_classes, num_labels
        self._after = np.arange(1, num_labels) * max(1, num_classes // num_labels)
        self._num_samples = num_samples or num_classes
        self._image = np.random.default_rng(0).integers(0, 256, (image_size, image_size, 3), np.uint8)

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int) -> Sample:
        more = ((index + self._after) % self.num_classes).tolist() if self.num_labels > 1 else ()
        return Sample(self._image, index % self.num_classes, index, tuple(more))

    def where(self, index: int) -> str:
        return f"synthetic sample {index}"

    def layout(self) -> Iterator[bytes]:
        return iter(())  # its samples are functions of their number

    def labels(self) -> NDArray[np.int64]:
        index_N = np.arange(self._num_samples)
        if self.num_labels > 1:
            return (index_N[:, None] + np.append(0, self._after)) % self.num_classes
        return index_N % self.num_classes
