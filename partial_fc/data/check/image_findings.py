"""From looks at the images of a set to findings.

N images looked at.
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
    Looks,
    described,
    repeated,
    sizes,
)
from partial_fc.findings import Describe, Finding, Severity

# code -> (severity, key, what)
_IMAGES: dict[int, tuple[Severity, str, str]] = {
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
}  # fmt: skip

# What the loader replaces by another image, up to --max-bad-records.
REPLACED = ("image-unreadable", "image-undecodable", "image-narrow", "image-cut")


def judge_images(
    looks: Looks, label_N: NDArray[np.int64], describe: Describe, file: str = "", size: int | None = None
) -> list[Finding]:
    """label_N: of the images looked at. size: height and width that the set says its images have."""
    found = []
    for code, (severity, key, what) in _IMAGES.items():
        places = np.flatnonzero(looks.code_N == code)
        if len(places):
            found.append(Finding(severity, key, what, len(places), places, described(looks, describe), file))
    return found + _judge_sizes(looks, describe, file, size) + _judge_repeated(looks, label_N, describe, file)


def _judge_sizes(looks: Looks, describe: Describe, file: str, size: int | None) -> list[Finding]:
    found = []
    of_size = sizes(looks)
    if not of_size:
        return []
    shown = ", ".join(f"{height} x {width}: {number:,}" for height, width, number in of_size[:5])
    more = f" and {len(of_size) - 5} more sizes" if len(of_size) > 5 else ""
    found.append(Finding("info", "image-sizes", f"images of height x width {shown}{more}", file=file))

    def with_size(place: int) -> Mapping[str, Any]:
        return {
            **describe(place),
            "height": int(looks.height_N[place]),
            "width": int(looks.width_N[place]),
        }

    height, width, most = of_size[0]
    usual = (size, size) if size else (height, width)
    decoded = looks.height_N > 0
    other = np.flatnonzero(decoded & ((looks.height_N != usual[0]) | (looks.width_N != usual[1])))
    if len(other) and (size or most >= 0.99 * decoded.sum()):
        who = "`property` says" if size else "nearly all have"
        what = f"images are not {usual[0]} x {usual[1]}, as {who}: training resizes and crops them"
        found.append(Finding("warning", "image-other-size", what, len(other), other, with_size, file))
    grey = np.flatnonzero(decoded & ~looks.coloured_N)
    if len(grey):
        what = f"of {int(decoded.sum()):,} images have no colour"
        found.append(Finding("info", "image-grey", what, len(grey), file=file))
    return found


def _judge_repeated(looks: Looks, label_N: NDArray[np.int64], describe: Describe, file: str) -> list[Finding]:
    pair_P2 = repeated(looks.hash_N)

    def both(place: int) -> Mapping[str, Any]:
        first, second = (describe(int(i)) for i in pair_P2[place])
        return {**second, **{f"same as {name}": value for name, value in first.items()}}

    differ = label_N[pair_P2[:, 0]] != label_N[pair_P2[:, 1]]
    found = []
    for severity, key, what, chosen in (
        ("error", "repeated-other-class", "image files also occur in another class: one label of two is wrong", differ),
        ("warning", "repeated-same-class", "image files repeat another one of their class", ~differ),
    ):  # fmt: skip
        places = np.flatnonzero(chosen)
        if len(places):
            found.append(Finding(severity, key, what, len(places), places, both, file))  # type: ignore[arg-type]
    return found
