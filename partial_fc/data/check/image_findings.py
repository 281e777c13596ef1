"""From a scan of images to findings.

N images scanned.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.check.images import (
    CONSTANT,
    CUT,
    DAMAGED,
    GREY_REST,
    NARROW,
    NOT_AN_IMAGE,
    NOT_READ,
    PADDED,
    ImageScan,
)
from partial_fc.findings import Describe, Finding, Severity, findings_at

# code -> (severity, key, what)
_BY_CODE: dict[int, tuple[Severity, str, str]] = {
    NOT_READ: ("error", "image-unreadable", "images cannot be read: training puts others in their place"),
    NOT_AN_IMAGE: ("error", "image-undecodable", "files are no image that OpenCV can decode"),
    NARROW: ("error", "image-narrow", "images are too long and narrow to be made square"),
    CUT: ("error", "image-cut", "JPEG files are cut short: they have no end marker"),
    DAMAGED: (
        "error",
        "image-damaged",
        "images decode with a complaint of the decoder: part of what is seen is made up, and training would not notice",
    ),
    GREY_REST: ("warning", "image-grey-rest", "images end in grey rows: were they cut short once and saved again?"),
    CONSTANT: ("warning", "image-constant", "images show one colour and nothing else"),
    PADDED: ("warning", "image-padded", "JPEG files hold a few bytes too many: padding, or damage in their last rows"),
}

# What the loader replaces by another image, up to --max-bad-records.
REPLACED = ("image-unreadable", "image-undecodable", "image-narrow", "image-cut")


def check_images(
    scan: ImageScan, label_N: NDArray[np.int64], describe: Describe, file: str = "", size: int | None = None
) -> list[Finding]:
    """label_N: of the images scanned. size: height and width that the set says its images have."""

    def with_problem(index: int) -> Mapping[str, Any]:
        message = scan.messages.get(index)
        return {**describe(index), **({"problem": message} if message else {})}

    findings = []
    for code, (severity, key, what) in _BY_CODE.items():
        findings += findings_at(severity, key, what, scan.code_N == code, with_problem, file)
    return findings + _check_sizes(scan, describe, file, size) + _check_repetitions(scan, label_N, describe, file)


def _check_sizes(scan: ImageScan, describe: Describe, file: str, size: int | None) -> list[Finding]:
    sizes = scan.sizes()
    if not sizes:
        return []
    shown = ", ".join(f"{height} x {width}: {number:,}" for height, width, number in sizes[:5])
    more = f" and {len(sizes) - 5} more sizes" if len(sizes) > 5 else ""
    decoded = scan.height_N > 0
    if (scan.height_N != scan.width_N).sum() > decoded.sum() / 2:
        more += ". Most are not square: training sees their middle. Are faces cut out and aligned (docs/data.md)?"
    findings = [Finding("info", "image-sizes", f"images of height x width {shown}{more}", file=file)]

    def with_size(index: int) -> Mapping[str, Any]:
        return {**describe(index), "height": int(scan.height_N[index]), "width": int(scan.width_N[index])}

    height, width, most = sizes[0]
    usual = (size, size) if size else (height, width)
    if size or most >= 0.99 * decoded.sum():
        who = "`property` says" if size else "nearly all have"
        what = f"images are not {usual[0]} x {usual[1]}, as {who}: training resizes and crops them"
        other = decoded & ((scan.height_N != usual[0]) | (scan.width_N != usual[1]))
        findings += findings_at("warning", "image-other-size", what, other, with_size, file)
    grey = int((decoded & ~scan.coloured_N).sum())
    if grey:
        what = f"images have no colour, of {int(decoded.sum()):,}"
        findings.append(Finding("info", "image-grey", what, grey, file=file))
    return findings


def _check_repetitions(scan: ImageScan, label_N: NDArray[np.int64], describe: Describe, file: str) -> list[Finding]:
    pair_P2 = scan.repetitions()

    def both(pair: int) -> Mapping[str, Any]:
        first, second = (describe(int(i)) for i in pair_P2[pair])
        return {**second, **{f"same as {name}": value for name, value in first.items()}}

    differ = label_N[pair_P2[:, 0]] != label_N[pair_P2[:, 1]]
    what = "image files also occur in another class: one label of two is wrong"
    findings = findings_at("error", "repeated-other-class", what, differ, both, file)
    what = "image files repeat another one of their class"
    return findings + findings_at("warning", "repeated-same-class", what, ~differ, both, file)
