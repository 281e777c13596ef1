"""The check of the data before training (--check-data): is it fit for training, and the same on all ranks?

The ranks share the work and gather the results, so that all ranks decide the same from the same numbers. N samples of
the set, n of them scanned.
"""

import itertools
import time
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc.comm import World, all_gather_json, all_or_raise
from partial_fc.data import Source
from partial_fc.data.check.images import CONSTANT, CUT, REPLACED, ImageScan, check_images, scan_images
from partial_fc.data.check.labels import UNREAD, check_class_number, check_folders, check_labels, check_range, labels_of
from partial_fc.data.labels import WRONG, first
from partial_fc.data.sample import BadRecord, LabelOutOfRange, still
from partial_fc.data.sets.joined import tables_of
from partial_fc.data.vectors import BLOCK, Vectors
from partial_fc.findings import Finding, counted, findings_at, text_lines

Mode = Literal["quick", "off"]

_SAMPLE = 512
_FEW = 16  # with fewer images, nothing is said about what all have in common
_CHEAP_BYTES = 1 << 30  # of a .rec, whose labels lie beside the images
_MESSAGES = 20  # per rank
_SHOWN = 3

# Errors that training survives, or that do not make it pointless.
_TOLERATED = (*REPLACED, "image-damaged", "repeated-other-class")


def check_data(
    source: Source,
    num_classes: int,
    mode: Mode,
    world: World,
    *,
    max_bad_records: int,
    seed: int = 0,
    num_threads: int = 2,
    embedding: bool = False,
) -> list[str]:
    """Checks the data and returns lines for the log. Raises ValueError, on all ranks alike, if training on it would be
    pointless or would fail. A collective.

    quick: some hundred images spread over the set, and all labels if they are cheap to read. max_bad_records: how many
    the loader replaces on each rank. embedding: the run trains an embedding, which needs crops and many classes.
    """
    if mode == "off":
        return []
    started = time.perf_counter()
    if tables := tables_of(source):
        findings, what = _check_vectors(source, tables, num_classes, world, max_bad_records)
    else:
        findings, what = _check_images(source, num_classes, world, max_bad_records, seed, num_threads, embedding)
    errors = [finding for finding in findings if finding.severity == "error" and finding.key not in _TOLERATED]
    if errors:
        listed = "\n".join(f"  {line}" for finding in errors for line in text_lines(finding, _SHOWN))
        raise ValueError(
            f"the training data cannot be used (--check-data {mode} checked {what}):\n{listed}\n"
            "`partial-fc doctor data` lists all findings; --check-data off trains anyway"
        )
    rest = [finding for finding in findings if finding.severity != "info"]
    verdict = counted(len(rest), "finding") if rest else "nothing wrong"
    seconds = time.perf_counter() - started
    return [
        f"--check-data {mode}: {what} in {seconds:.1f} s: {verdict}",
        *(line for finding in rest for line in text_lines(finding, _SHOWN)),
    ]


def _check_vectors(
    source: Source, tables: list[Vectors], num_classes: int, world: World, max_bad_records: int
) -> tuple[list[Finding], str]:
    """Returns (findings, the words for what was checked). tables: the files of the source; all vectors of up to 1 GB
    are read, else 64 blocks of them."""
    starts = itertools.accumulate(map(len, tables), initial=0)
    blocks = [(table, start, first) for table, start in zip(tables, starts, strict=False)
              for first in range(0, len(table), BLOCK)]  # fmt: skip
    if sum(table.row_ND.nbytes for table in tables) > _CHEAP_BYTES:
        blocks = [blocks[at] for at in np.unique(np.linspace(0, len(blocks) - 1, 64).astype(np.int64)).tolist()]
    found = [start + table.unusable([first]) for table, start, first in blocks[world.rank :: world.size]]
    mine = np.concatenate([np.empty(0, np.int64), *found])
    bad = np.sort(world.all_gather(torch.from_numpy(mine), name="data/vectors").numpy())
    label_N = _all_labels(source, world)
    assert label_N is not None

    def describe(i: int) -> Mapping[str, Any]:
        return {"file": source.where(i), "class": int(first(label_N)[i])}

    findings = check_labels(label_N, num_classes, describe, names=source.class_names() or (), embedding=True,
                            unit="vector")  # fmt: skip
    checked = sum(min(BLOCK, len(table) - first) for table, _, first in blocks)
    what = f"{len(bad):,} of {checked:,} vectors have NaN or Inf, or only zeros"
    if len(bad) > max_bad_records:
        what += f"; training stops after {max_bad_records} on a rank (--max-bad-records)"
    findings += findings_at("error" if len(bad) > max_bad_records else "warning", "vectors-bad", what, bad, describe)
    return findings, f"{checked:,} of {counted(len(source), 'vector')} and all labels"


def _check_images(
    source: Source, num_classes: int, world: World, max_bad_records: int, seed: int, num_threads: int, embedding: bool
) -> tuple[list[Finding], str]:
    """Returns (findings, the words for what was checked)."""
    index_n = _choose_indices(len(source), seed)
    scan, label_n = _scan(source, index_n, world, num_threads)
    wrong_n = label_n == WRONG
    label_n[wrong_n] = UNREAD
    label_N = _all_labels(source, world)

    def describe(i: int) -> Mapping[str, Any]:
        label = int(label_n[i])
        return {"file": source.where(int(index_n[i])), **({} if label == UNREAD else {"class": label})}

    findings = check_images(scan, label_n, describe, embedding=embedding) + check_folders(source)
    what = f"samples do not have 1 to {source.num_labels} class numbers as labels (--labels)"
    findings += findings_at("error", "labels-wrong", what, wrong_n, lambda i: {"problem": scan.messages.get(i, "")})
    if label_N is None:
        labels = "their labels"
        read = np.flatnonzero(label_n != UNREAD)
        findings += check_range(label_n[read], num_classes, lambda i: describe(int(read[i])))
        findings += check_class_number(num_classes, names=source.class_names() or ())
        values = np.unique(label_n[read])
        if len(values) == 1 and num_classes > 1 and len(label_n) >= _FEW:
            what = f"all labels are {values[0]}: have the real ones been lost?"
            findings.append(Finding("error", "label-constant", what))
    else:
        read = np.flatnonzero(first(label_N) != UNREAD)
        read_label = label_N[read]
        labels = "all labels" if len(read) == len(source) else counted(len(read), "label")
        findings += check_labels(
            read_label,
            num_classes,
            lambda i: {"file": source.where(int(read[i])), "class": int(first(read_label)[i])},
            names=source.class_names() or (),
            embedding=embedding,
        )
    findings += _check_whole(scan, len(source), max_bad_records)
    return findings, f"{len(index_n):,} of {counted(len(source), 'image')} and {labels}"


def _choose_indices(num_samples: int, seed: int) -> NDArray[np.int64]:
    """Returns one sample from each of n equal stretches of the set, or all samples; the same on all ranks."""
    if num_samples <= _SAMPLE:
        return np.arange(num_samples)
    edges = np.linspace(0, num_samples, _SAMPLE + 1).astype(np.int64)
    return np.random.default_rng(seed).integers(edges[:-1], edges[1:])


def _scan(
    source: Source, index_n: NDArray[np.int64], world: World, num_threads: int
) -> tuple[ImageScan, NDArray[np.int64]]:
    """Scans these images, every rank its share. Returns (the scan, their labels)."""
    mine = index_n[world.rank :: world.size].tolist()
    label_m = np.full(len(mine), UNREAD)

    def read(i: int) -> bytes | NDArray[np.uint8]:
        try:
            sample = source.read(mine[i])
        except LabelOutOfRange as error:  # all ranks need to know it
            label_m[i] = error.label
            raise BadRecord(str(error)) from error
        label_m[i] = sample.label
        return still(sample)

    source.will_need(mine)
    scan, own = ImageScan(len(index_n)), scan_images(read, len(mine), num_threads)
    label_n = np.empty(len(index_n), np.int64)
    columns: tuple[NDArray[Any], ...] = (scan.code_N, scan.hash_N, scan.height_N, scan.width_N, label_n)
    found = [column.tolist() for column in (own.code_N, own.hash_N, own.height_N, own.width_N, label_m)]
    first = sorted(own.messages.items())[:_MESSAGES]
    for rank, (messages, values) in enumerate(all_gather_json((first, found), world, "data/scan")):
        scan.messages |= {rank + world.size * i: message for i, message in messages}
        for column_n, value in zip(columns, values, strict=True):
            column_n[rank :: world.size] = np.array(value, column_n.dtype)
    return scan, label_n


def _all_labels(source: Source, world: World) -> NDArray[np.int64] | None:
    """Returns all labels, UNREAD for unreadable ones; None if they are not cheap to read. Raises ValueError if they
    differ between ranks: each host may have its own copy."""
    label_N = None
    if source.label_bytes() <= _CHEAP_BYTES:
        # A disk then reads them in sequence, and training finds them in memory.
        source.will_need(range(len(source)))
        several = source.num_labels > 1  # a copy on one host may have wrong ones
        label_N = all_or_raise(lambda: labels_of(source), world, "data/several") if several else labels_of(source)
    digest = -1 if label_N is None else zlib.crc32(label_N.tobytes())
    digest_W = world.all_gather(torch.tensor([digest]), name="data/digest").tolist()
    if -1 in digest_W:
        return None
    others = [str(rank) for rank, other in enumerate(digest_W) if other != digest_W[0]]
    if others:
        raise ValueError(
            f"{world}: rank(s) {', '.join(others)} read other labels than rank 0: the training data "
            "is not the same on all hosts; copy it to theirs again"
        )
    return label_N


def _check_whole(scan: ImageScan, num_samples: int, max_bad_records: int) -> list[Finding]:
    """Estimates findings about the whole set from the scanned images."""
    num_scanned = len(scan.code_N)
    findings = []
    bad = np.flatnonzero(scan.code_N >= CUT)
    expected = len(bad) * num_samples / max(1, num_scanned)
    # A single one in a sample is a poor estimate of their number.
    many = expected > max_bad_records and (len(bad) > 1 or num_scanned == num_samples or not max_bad_records)
    if many or len(bad) == num_scanned:
        about = "" if num_scanned == num_samples else f", an estimated {expected:,.0f} of {num_samples:,}"
        what = (
            f"{len(bad):,} of {num_scanned:,} images cannot be used{about}; training stops after {max_bad_records} on "
            "a rank (--max-bad-records)"
        )
        findings += findings_at("error", "images-bad", what, bad, lambda i: {"problem": scan.messages.get(i, "")})
    if num_scanned < _FEW:
        return findings
    constant = int((scan.code_N == CONSTANT).sum())
    if constant > num_scanned / 2:
        what = f"{constant:,} of {num_scanned:,} images are of a single colour"
        findings.append(Finding("error", "images-constant", what, constant))
    elif len(scan.repetitions()) == num_scanned - 1:
        what = f"all {num_scanned:,} images are identical"
        findings.append(Finding("error", "images-equal", what, num_scanned))
    return findings
