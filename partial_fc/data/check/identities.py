"""Check of InsightFace's header records against the images: record 0, identity ranges, labels, ids, order.

Record 0 holds [first identity key, end of identity keys), each identity record [first image, end of images), as
float32, exact up to 2^24 only. N images, in key order.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.check.recordio import Records
from partial_fc.data.recordio import are_whole
from partial_fc.findings import Finding, Severity, counted, findings_at

_EXACT = 2**24


def check_identities(records: Records) -> tuple[list[Finding], int | None]:
    """Returns (findings, number of identity records; None: the set has none, every key is an image)."""
    headless = np.flatnonzero((records.content_bytes_R == 0) & ~records.cut_R)
    if records.num_counted is not None:
        what = f"record 0 counts {records.num_counted:,} images, without identity records: keys 1 to that are read"
        findings = [Finding("info", "record-0-counts", what, file=str(records.path))]
        return findings + _labels_without_image(records, headless[headless > 0]), None
    if records.key_R[0] != 0 or records.content_bytes_R[0] > 0:
        return _labels_without_image(records, headless), None
    # The longest run of consecutive keys behind record 0.
    identity = max(np.split(headless[1:], np.flatnonzero(np.diff(headless[1:]) > 1) + 1), key=len)
    file = str(records.path)
    if records.flag(0) < 2 or not len(identity):
        what = (
            f"record 0 has no image, flag {records.flag(0)} and {len(identity)} identity records follow; expected "
            "two labels, [first identity key, end of identity keys), or an image"
        )
        return [Finding("error", "identity-record-0", what, file=file)], None
    key_I = records.key_R[identity]
    findings = [*_labels_without_image(records, np.setdiff1d(headless[1:], identity)), *_check_record_0(records, key_I)]
    return [*findings, *_check_ranges(records, identity)], len(identity)


def _labels_without_image(records: Records, headless: NDArray[np.int64]) -> list[Finding]:
    what = (
        "records have a label but no image: readers without support for identity records treat them as damaged images"
    )
    keys, file = records.key_R, str(records.path)
    return findings_at("error", "record-no-image", what, headless, lambda row: {"key": int(keys[row])}, file)


def _check_record_0(records: Records, key_I: NDArray[np.int64]) -> list[Finding]:
    file = str(records.path)
    stored = np.append(records.raw_label_R[:1], records.second_labels(np.array([0])))
    first, end = int(key_I[0]), int(key_I[-1]) + 1
    findings = []
    if stored.tolist() != [np.float32(first), np.float32(end)] or end - first != len(key_I):
        what = (
            f"record 0 says that identity records are [{stored[0]:.0f}, {stored[1]:.0f}); without an image are "
            f"{len(key_I):,} keys from {first} to {end - 1}"
        )
        findings.append(Finding("error", "identity-record-0", what, file=file))
    elif end - 1 > _EXACT:
        what = (
            f"record 0 and the identity records name keys above {_EXACT:,}, which float32 rounds to even numbers. This "
            "trainer looks at the records themselves; readers that trust the numbers may take an identity record for "
            "an image"
        )
        findings.append(Finding("info", "identity-rounded", what, file=file))
    what = f"images have keys among or behind those of the identity records, from {first} on: not read"
    late = records.key_N >= first
    return findings + findings_at("error", "identity-late-image", what, late, records.describe, file)


def _check_ranges(records: Records, identity: NDArray[np.int64]) -> list[Finding]:
    """Checks that the ranges follow one another and that the images of each have one label."""
    file = str(records.path)
    key_I = records.key_R[identity]
    start_I = records.raw_label_R[identity].astype(np.float64)
    stop_I = records.second_labels(identity).astype(np.float64)

    def describe(i: int) -> Mapping[str, Any]:
        return {"key": int(key_I[i]), "identity": i, "range": f"[{start_I[i]:.0f}, {stop_I[i]:.0f})"}

    def add(severity: Severity, key: str, what: str, which: NDArray[np.bool_]) -> None:
        findings.extend(findings_at(severity, key, what, which, describe, file))

    findings: list[Finding] = []
    expected_I = np.append(records.key_N[0], stop_I[:-1])
    good = np.isfinite(start_I) & np.isfinite(stop_I) & (start_I >= 1) & (start_I <= stop_I)
    good &= stop_I <= np.float32(key_I[0])
    what = f"identity records whose range of images is not within 1 to {key_I[0]}, or runs backwards"
    add("error", "identity-range", what, ~good)
    joined = start_I == expected_I
    joined[0] |= start_I[0] == 1  # its first images may be missing
    add("error", "identity-gap", "identity records do not start where the one before ends", good & ~joined)
    # Rounded ends would put the images at a boundary into the wrong range.
    exact = good & (stop_I < _EXACT)
    begin_I, end_I = (np.searchsorted(records.key_N, np.where(exact, k, 0)) for k in (start_I, stop_I))
    exact &= end_I > begin_I
    label_N = records.label_N
    changes_N = np.append(0, np.cumsum(label_N[1:] != label_N[:-1], dtype=np.int32))  # of the label, up to each image
    first_I = np.minimum(begin_I, len(label_N) - 1)
    mixed = exact & (changes_N[first_I] != changes_N[end_I - 1])
    add("error", "identity-mixed", "identities whose images have different labels", mixed)
    what = "identities whose images have another label than their place among the identity records"
    add("warning", "identity-number", what, exact & ~mixed & (label_N[first_I] != key_I - key_I[0]))
    return findings


def check_layout(records: Records) -> list[Finding]:
    """Checks for labels that are no class numbers, ids that differ from keys, missing keys, and the file order."""
    file = str(records.path)
    raw_N = records.raw_label_R[records.image_N]
    what = "labels are not whole numbers: training treats these records as damaged"
    findings = findings_at("error", "label-fraction", what, ~are_whole(raw_N), records.describe, file)
    what = f"labels above {_EXACT:,}: float32 rounds them, and classes fall together"
    large = np.isfinite(raw_N) & (np.abs(raw_N) > _EXACT)
    findings += findings_at("error", "label-float32", what, large, records.describe, file)
    wrong = records.wrong_ids()

    def with_id(i: int) -> Mapping[str, Any]:
        return {**records.describe(i), "id": int(records.ids(records.image_N[i : i + 1])[0])}

    if len(wrong) < len(records) / 2:  # else the ids are something else, or all 0
        what = "records have another id than their key, most others have it: is part of the index that of another file?"
        findings += findings_at("warning", "record-id", what, wrong, with_id, file)
    key_N = records.key_N

    def hole(i: int) -> Mapping[str, Any]:
        return {"behind key": int(key_N[i]), "missing": int(key_N[i + 1] - key_N[i] - 1)}

    holes = np.flatnonzero(key_N[1:] > key_N[:-1] + 1)
    if len(holes):
        what = "keys between the first and the last image that no record has: left out when the set was packed?"
        missing = int((key_N[holes + 1] - key_N[holes] - 1).sum())
        findings.append(Finding("info", "key-holes", what, missing, holes, hole, file))
    return [*findings, _check_order(records)]


def _check_order(records: Records) -> Finding:
    order, label_N, file = records.in_file_order(), records.label_N, str(records.path)
    num_images = len(order)
    backwards = int((order[1:] < order[:-1]).sum())
    in_order = "in order of their keys" if not backwards else f"with {counted(backwards, 'step')} back in their keys"
    ordered = label_N[order] if backwards else label_N
    neighbours = float((ordered[1:] == ordered[:-1]).mean()) if num_images > 1 else 0.0
    _, counts = np.unique(label_N, return_counts=True)
    pairs = max(1, num_images * (num_images - 1))
    by_chance = float((counts * (counts - 1.0)).sum() / pairs)
    sorted_by_class = 1 - (len(counts) - 1) / max(1, num_images - 1)
    if neighbours > (by_chance + sorted_by_class) / 2:
        what = (
            f"images are stored {in_order}, class by class ({neighbours:.0%} have the class of the one before). This "
            "trainer draws a new order for each epoch; for readers that go through the file in order it is not "
            "shuffled, and on a disk the random order costs a seek for each image (docs/data.md)"
        )
        return Finding("info", "order-by-class", what, file=file)
    shares = f"{neighbours:.1%} have the class of the one before, {by_chance:.1%} by chance"
    return Finding("info", "order-shuffled", f"images are stored {in_order}, classes mixed ({shares})", file=file)
