"""`python -m demo digits`: real handwritten digits as MNIST's four files, for machines without MNIST.

scikit-learn contains 1,797 scans of 8 x 8 pixels (UCI, 13 people, https://archive.ics.uci.edu/dataset/80). They are
enlarged in MNIST's style: white on black, 20 pixels high, centre of mass in the middle of 28 x 28.

The split is fixed: scans 0 to 1,286 train, 1,287 to 1,796 test, in scikit-learn's order, which shows forms of about 130
digits; the test digits are from four separate forms. (14 forms, 13 people: a writer may be in both parts.)
"""

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc import pictures
from partial_fc.data.idx import ImageSet, Split, names
from partial_fc.files import check_new, replacing

NUM_TRAIN = 1287
_SIDE, _DRAWN = 28, 20  # pixels of an image, and of the square that a scan fills
_ONE = 1 << 12  # denominator of integer interpolation weights: the same bytes on every machine
_BRIGHTEST = 16  # of a scan's pixels


@dataclass(frozen=True)
class DigitsOptions:
    """Writes scikit-learn's handwritten digits as MNIST's files: 1,287 to train and 510 to test."""

    out: Path
    """Folder for the files and digits.png, a picture of some; made if it is not there."""
    plain: bool = False
    """Uncompressed, without .gz."""


def write_digits(options: DigitsOptions) -> None:
    """Writes the four files and the picture. Raises ValueError if MNIST's files exist."""
    sets = load()
    for name in (name for split in sets for name in names(split)):
        check_new(options.out / name, options.out / f"{name}.gz")
    options.out.mkdir(parents=True, exist_ok=True)
    for split, (image_NHW, label_N) in sets.items():
        for name, array in zip(names(split), (image_NHW, label_N.astype(np.uint8)), strict=True):
            write_idx(options.out / (name if options.plain else f"{name}.gz"), array)
    pictures.write(options.out / "digits.png", contact_sheet(sets["train"]))
    print(f"{options.out}: {NUM_TRAIN} digits to train, {len(sets['t10k'].label_N)} to test; digits.png shows some")


def load() -> dict[Split, ImageSet]:
    """Returns the two sets, 28 x 28. Raises ValueError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "the digits are scikit-learn's, which is not installed: pip install -c constraints.txt '.[digits]'"
        ) from error
    scans = load_digits()
    image_NHW = enlarge(scans.images.astype(np.int64))
    label_N = scans.target.astype(np.int64)
    return {
        "train": ImageSet(image_NHW[:NUM_TRAIN], label_N[:NUM_TRAIN]),
        "t10k": ImageSet(image_NHW[NUM_TRAIN:], label_N[NUM_TRAIN:]),
    }


def enlarge(scan_N88: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Enlarges (N, 8, 8), 0 to 16, to (N, 28, 28), 0 to 255: cubic interpolation, centre of mass in the middle.

    Integer arithmetic only. Raises ValueError for a scan that is empty or too far off centre.
    """
    weight = _cubic_weights(scan_N88.shape[-1], _DRAWN)
    drawn_NHW = weight @ scan_N88 @ weight.T
    whole = _ONE * _ONE * _BRIGHTEST
    drawn_NHW = ((drawn_NHW * 255 + whole // 2) // whole).clip(0, 255)  # cubics overshoot below 0 and above the maximum
    image_NHW = np.zeros((len(scan_N88), _SIDE, _SIDE), np.uint8)
    for number, drawn_HW in enumerate(drawn_NHW):
        top, left = (_start(drawn_HW.sum(axis), number) for axis in (1, 0))
        image_NHW[number, top : top + _DRAWN, left : left + _DRAWN] = drawn_HW
    return image_NHW


def _start(mass: NDArray[np.int64], number: int) -> int:
    """Returns the drawn square's start along an axis that puts the centre of mass in the image's middle."""
    total = int(mass.sum())
    moment = int((mass * (2 * np.arange(_DRAWN) + 1)).sum())  # twice the centre, from the edge, times the mass
    start = (_SIDE * total - moment + total) // (2 * total) if total else -1
    if not 0 <= start <= _SIDE - _DRAWN:
        raise ValueError(f"scan {number} cannot be centred: it is empty, or all at one edge")
    return start


def _cubic_weights(size_in: int, size: int) -> NDArray[np.int64]:
    """Returns (size, size_in): the weight of each old pixel in each new one, over _ONE; Keys' cubic (1981) with a =
    -1/2. Beyond the edge is background."""
    centre = (np.arange(size) + 0.5) * size_in / size - 0.5
    x = np.abs(centre[:, None] - np.arange(size_in)[None, :])
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.rint(_ONE * np.where(x < 1, near, np.where(x < 2, far, 0))).astype(np.int64)


def contact_sheet(digits: ImageSet, num_a_class: int = 20, zoom: int = 2) -> NDArray[np.uint8]:
    """Draws classes, one a row, with their first images; uint8 (height, width)."""
    rows = []
    for label in np.unique(digits.label_N):
        image_KHW = digits.image_NHW[digits.label_N == label][:num_a_class]
        black = np.zeros((num_a_class - len(image_KHW), *image_KHW.shape[1:]), np.uint8)
        rows.append(np.concatenate((*image_KHW, *black), axis=1))
    return np.concatenate(rows).repeat(zoom, 0).repeat(zoom, 1)


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    """Writes (N, H, W) images or (N,) labels, atomically; compressed if the name ends with .gz. The same array gives
    the same bytes: there is no time stamp."""
    content = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
    with replacing(path) as partial:
        partial.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
