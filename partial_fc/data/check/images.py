"""A scan of images, and its findings: undecodable, damaged, blank or repeated images, and whole photos instead of
crops.

N images scanned, of which 16 bytes each are kept.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simplejpeg import decode_jpeg, decode_jpeg_header

from partial_fc import terminal
from partial_fc.data.decode import MAX_JPEG, check_proportions, decode
from partial_fc.data.sample import BadRecord
from partial_fc.data.vectors import BLOCK, Vectors
from partial_fc.findings import Describe, Finding, Severity, findings_at

# The fault of an image, in ascending severity. CUT and above are unusable.
GOOD, PADDED, CONSTANT, DAMAGED, CUT, NARROW, NOT_AN_IMAGE, NOT_READ = range(8)

# code -> (severity, key, what)
_BY_CODE: dict[int, tuple[Severity, str, str]] = {
    NOT_READ: ("error", "image-unreadable", "images cannot be read: training replaces them by others"),
    NOT_AN_IMAGE: ("error", "image-undecodable", "files are not images that OpenCV can decode"),
    NARROW: ("error", "image-narrow", "images are too narrow to be cropped to a square"),
    CUT: ("error", "image-cut", "JPEG files are truncated: they have no end marker"),
    DAMAGED: ("error", "image-damaged", "JPEG files are damaged: decoders fill gaps with grey, unreported in training"),
    CONSTANT: ("warning", "image-constant", "images are of a single colour"),
    PADDED: ("warning", "image-padded", "JPEG files have a few extra bytes: padding, or damage in the last rows"),
}

# Faults that the loader replaces by another image, up to --max-bad-records.
REPLACED = ("image-unreadable", "image-undecodable", "image-narrow", "image-cut")

# A whole photo, probably: wider or higher than crops are (CelebA's have 1.22, most 1), and not as small.
_PHOTO_RATIO, _PHOTO_SIDE = 1.2, 160
_PHOTO_SHARE = 0.25  # the share of the images from which on it is reported

Read = Callable[[int], bytes | NDArray[np.uint8]]
_BLOCK = 64  # images that a thread scans before it takes the next ones
_WINDOW = 1024  # images between two steps of the progress bar
_MESSAGES_KEPT = 10_000
_FLAT = 2  # grey levels by which a decoded JPEG of one colour may vary
# All pixels are decoded by then: a few extra bytes are a writer's padding, many are left over from earlier damage.
_PADDING = re.compile(r"Corrupt JPEG data: ([12]?\d|3[0-2]) extraneous bytes before marker 0xd9")


class ImageScan:
    """The results of a scan. code_N: a fault code from above. hash_N: of the file, 0: not decoded. height_N, width_N:
    pixels, 0: not decoded. messages: the errors of the first bad images, by index."""

    def __init__(self, num_images: int) -> None:
        self.code_N = np.zeros(num_images, np.uint8)
        self.hash_N = np.zeros(num_images, np.uint64)
        self.height_N = np.zeros(num_images, np.uint16)
        self.width_N = np.zeros(num_images, np.uint16)
        self.messages: dict[int, str] = {}

    def set_code(self, index: int, code: int, message: str = "") -> None:
        self.code_N[index] = code
        if message and len(self.messages) < _MESSAGES_KEPT:
            self.messages[index] = message

    def repetitions(self) -> NDArray[np.int64]:
        """Returns indices of equal files, (pairs, 2): the first occurrence and a repetition, sorted by the second."""
        known = np.flatnonzero(self.hash_N)
        _, first, of_image = np.unique(self.hash_N[known], return_index=True, return_inverse=True)
        first = first[of_image]
        again = first != np.arange(len(known))
        return np.stack((known[first[again]], known[again]), axis=1)

    def sizes(self) -> list[tuple[int, int, int]]:
        """Returns (height, width, number of images), the most frequent first."""
        decoded = self.height_N > 0
        packed = self.height_N[decoded].astype(np.int64) << 16 | self.width_N[decoded]
        values, counts = (array.tolist() for array in np.unique(packed, return_counts=True))
        sizes = [(size >> 16, size & 0xFFFF, count) for size, count in zip(values, counts, strict=True)]
        return sorted(sizes, key=lambda size: -size[2])


def scan_images(read: Read, num_images: int, num_threads: int, *, bar: str = "") -> ImageScan:
    """Scans images 0 to num_images - 1, roughly in order; read(i) returns an image file or pixels (H, W, 3) or (H, W,
    1), or raises BadRecord. bar: the name of a progress bar, if any."""
    scan = ImageScan(num_images)

    def scan_block(start: int) -> None:
        for index in range(start, min(start + _BLOCK, num_images)):
            _scan_image(scan, index, read)

    with (
        ThreadPoolExecutor(num_threads, thread_name_prefix="scan") as pool,
        terminal.bar(total=num_images, unit="image", desc=bar, shown=bool(bar)) as progress,
    ):
        for start in range(0, num_images, _WINDOW):
            stop = min(start + _WINDOW, num_images)
            list(pool.map(scan_block, range(start, stop, _BLOCK)))
            progress.update(stop - start)
    return scan


def _scan_image(scan: ImageScan, index: int, read: Read) -> None:
    try:
        content = read(index)
    except BadRecord as error:
        scan.set_code(index, NOT_READ, str(error))
        return
    try:
        image, complaint = decode_scanned(content) if isinstance(content, bytes) else (content, "")
    except BadRecord as error:
        assert isinstance(content, bytes)
        is_cut = content[:2] == b"\xff\xd8" and content.rfind(b"\xff\xd9") < 0
        scan.set_code(index, CUT if is_cut else NOT_AN_IMAGE, str(error))
        return
    try:
        check_proportions(image)
    except BadRecord as error:
        scan.set_code(index, NARROW, str(error))
        return
    scan.height_N[index], scan.width_N[index] = (min(side, 65535) for side in image.shape[:2])
    scan.hash_N[index] = hash_of(content if isinstance(content, bytes) else content.tobytes())
    low, high = int(image.min()), int(image.max())
    code, message = GOOD, ""
    if high - low <= _FLAT:
        code, message = CONSTANT, f"every pixel is {low}" + (f" to {high}" if high > low else "")
    if complaint and code < (fault := PADDED if _PADDING.fullmatch(complaint) else DAMAGED):
        code, message = fault, complaint
    scan.set_code(index, code, message)


def decode_scanned(content: bytes) -> tuple[NDArray[np.uint8], str]:
    """Decodes an image file to (RGB pixels, libjpeg's complaint about a JPEG or ""). libjpeg fills missing or garbled
    parts with grey, which training's decoder does not report. Raises BadRecord as `decode`."""
    try:
        height, width, kind, _ = decode_jpeg_header(content)
    except ValueError:  # another format
        return decode(content), ""
    if height * width > MAX_JPEG or kind not in ("YCbCr", "Gray") or content.rfind(b"\xff\xd9") < 0:
        return decode(content), ""
    complaint = ""
    try:
        image = decode_jpeg(content, "RGB")
    except ValueError as error:
        complaint = str(error)
        try:
            image = decode_jpeg(content, "RGB", strict=False)
        except ValueError:
            return decode(content), complaint
    return image, complaint


def hash_of(content: bytes | memoryview) -> int:
    """Returns a hash of 64 bits, never 0."""
    return max(1, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))


def check_images(
    scan: ImageScan,
    label_N: NDArray[np.int64],
    describe: Describe,
    file: str = "",
    size: int | None = None,
    *,
    embedding: bool = False,
) -> list[Finding]:
    """Returns the findings about a scan. label_N: of the scanned images. size: the (height, width) that the set states.
    embedding: recipe face trains on them, which needs crops, not whole photos."""

    def with_problem(index: int) -> Mapping[str, Any]:
        message = scan.messages.get(index)
        return {**describe(index), **({"problem": message} if message else {})}

    findings = []
    for code, (severity, key, what) in _BY_CODE.items():
        findings += findings_at(severity, key, what, scan.code_N == code, with_problem, file)
    findings += _check_sizes(scan, describe, file, size) + (_check_photos(scan, describe, file) if embedding else [])
    return findings + check_repetitions(scan, label_N, describe, file)


def unreadable(which: NDArray[np.int64], read: Read, describe: Describe, file: str) -> list[Finding]:
    """Returns the finding about records that could not be read, by their indices, with what is wrong with each."""

    def with_problem(index: int) -> Mapping[str, Any]:
        try:
            read(index)
        except BadRecord as error:
            return {**describe(index), "problem": str(error)}
        return describe(index)

    severity, key, what = _BY_CODE[NOT_READ]
    return findings_at(severity, key, what, which, with_problem, file)


def _check_sizes(scan: ImageScan, describe: Describe, file: str, size: int | None) -> list[Finding]:
    sizes = scan.sizes()
    if not sizes:
        return []
    shown = ", ".join(f"{height} x {width}: {number:,}" for height, width, number in sizes[:5])
    more = f" and {len(sizes) - 5} more sizes" if len(sizes) > 5 else ""
    decoded = scan.height_N > 0
    findings = [Finding("info", "image-sizes", f"images of height x width {shown}{more}", file=file)]
    height, width, most = sizes[0]
    usual = (size, size) if size else (height, width)
    if size or most >= 0.99 * decoded.sum():
        who = "`property` says" if size else "nearly all have"
        what = f"images are not {usual[0]} x {usual[1]}, as {who}: training resizes and crops them"
        other = decoded & ((scan.height_N != usual[0]) | (scan.width_N != usual[1]))
        findings += findings_at("warning", "image-other-size", what, other, _with_size(scan, describe), file)
    return findings


def _with_size(scan: ImageScan, describe: Describe) -> Describe:
    return lambda index: {**describe(index), "height": int(scan.height_N[index]), "width": int(scan.width_N[index])}


def _check_photos(scan: ImageScan, describe: Describe, file: str) -> list[Finding]:
    decoded = scan.height_N > 0
    shorter = np.minimum(scan.height_N, scan.width_N)
    ratio_N = np.maximum(scan.height_N, scan.width_N) / np.maximum(shorter, 1)
    photo = decoded & (ratio_N >= _PHOTO_RATIO) & (shorter >= _PHOTO_SIDE)
    if photo.sum() <= _PHOTO_SHARE * decoded.sum():
        return _check_square(scan, file)
    what = (
        f"images of {int(decoded.sum()):,} look like uncropped photos, not aligned crops: one side is {_PHOTO_RATIO} "
        f"times the other or more, and none is below {_PHOTO_SIDE} pixels. Training crops the square in the middle "
        f"and resizes it to --image-size: of the median one {1 - 1 / np.median(ratio_N[photo]):.0%} is cut off. Faces "
        "must be cropped and aligned first (docs/data.md); images that the object fills are fine"
    )
    return findings_at("warning", "image-photo", what, photo, _with_size(scan, describe), file)


def _check_square(scan: ImageScan, file: str) -> list[Finding]:
    """Says what is lost of crops of one size that are not square."""
    height, width, most = next(iter(scan.sizes()), (0, 0, 0))
    if height == width or most <= (scan.height_N > 0).sum() / 2:
        return []
    side = f"{height - width} of {height} rows" if height > width else f"{width - height} of {width} columns"
    what = (
        f"images are {height} x {width} (height x width): training takes the middle square, without {side} (of a face "
        "brow and chin). `partial-fc data pack --pad` and `data pairs --pad` add black bars instead"
    )
    return [Finding("warning", "image-not-square", what, most, file=file)]


def check_repetitions(
    scan: ImageScan, label_N: NDArray[np.int64], describe: Describe, file: str, things: str = "image files"
) -> list[Finding]:
    """Reports equal files, by hash_N: under two labels, or twice under one."""
    pair_P2 = scan.repetitions()

    def both(pair: int) -> Mapping[str, Any]:
        first, second = (describe(int(i)) for i in pair_P2[pair])
        return {**second, **{f"same as {name}": value for name, value in first.items()}}

    differ = label_N[pair_P2[:, 0]] != label_N[pair_P2[:, 1]]
    what = f"{things} also occur in another class: one of the two labels is wrong"
    findings = findings_at("error", "repeated-other-class", what, differ, both, file)
    what = f"{things} repeat another of the same class"
    return findings + findings_at("warning", "repeated-same-class", what, ~differ, both, file)


def check_vectors(
    parts: Sequence[Vectors], label_N: NDArray[np.int64], describe: Describe, file: str, bar: str = ""
) -> list[Finding]:
    """Reads every vector of the files. label_N: of all of them. describe(i) names vector i. bar: the name of a progress
    bar, if any."""
    length_N, scan = np.empty(len(label_N)), ImageScan(len(label_N))
    starts = itertools.accumulate(map(len, parts), initial=0)
    blocks = [(part, first, start) for part, start in zip(parts, starts, strict=False)
              for first in range(0, len(part), BLOCK)]  # fmt: skip
    for part, first, start in terminal.bar(blocks, unit="block", desc=bar, shown=bool(bar)):
        row_BD = np.ascontiguousarray(part.row_ND[first : first + BLOCK])
        some = slice(start + first, start + first + len(row_BD))
        with np.errstate(over="ignore"):
            row32_BD = row_BD.astype(np.float32, copy=False)  # as training sees them
        length_N[some] = np.sqrt(np.einsum("nd,nd->n", row32_BD, row32_BD, dtype=np.float64))
        scan.hash_N[some] = [hash_of(row_D.data) for row_D in row_BD]
    bad_N = ~np.isfinite(length_N) | (length_N == 0)
    scan.hash_N[bad_N] = 0

    def with_problem(i: int) -> Mapping[str, Any]:
        return {**describe(i), "problem": "only zeros" if length_N[i] == 0 else "NaN or Inf"}

    kinds = " and ".join(sorted({str(part.row_ND.dtype) for part in parts}))
    good = length_N[~bad_N]
    lengths = f", of length {good.min():.3g} to {good.max():.3g}, median {np.median(good):.3g}" if len(good) else ""
    findings = [Finding("info", "vectors", f"{kinds}, {parts[0].width} numbers{lengths}", len(label_N), file=file)]
    what = "vectors have NaN or Inf, or only zeros: training replaces them by others"
    findings += findings_at("error", "vectors-bad", what, bad_N, with_problem, file)
    return findings + check_repetitions(scan, label_N, describe, file, "vectors")
