"""Small sets for the doctor's tests, good ones, and its verdict on a set."""

import json
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np

from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.verbs.doctor.data import DataOptions, doctor_data

COUNTS = (4, 3, 5, 2)


def picture(seed: int, size: int = 24) -> bytes:
    """A JPEG file unlike those of other seeds."""
    few = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return cv2.imencode(".jpg", cv2.resize(few, (size, size)))[1].tobytes()


def class_folders(folder: Path, labels: Iterable[int]) -> Path:
    """Writes FOLDER/classLABEL/NUMBER.jpg, each another picture; returns the folder."""
    for number, label in enumerate(labels):
        path = folder / f"class{label}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return folder


def records(counts: tuple[int, ...] = COUNTS) -> dict[int, bytes]:
    """Key -> record, in InsightFace's layout."""
    label_N = np.repeat(np.arange(len(counts)), counts).tolist()
    out = {key: pack([label, 1.0], picture(key), id=key) for key, label in enumerate(label_N, start=1)}
    first = 1 + sum(counts)
    out[0] = pack([first, first + len(counts)], b"")
    start = 1
    for label, count in enumerate(counts):
        out[first + label] = pack([start, start + count], b"", id=first + label)
        start += count
    return out


def write(folder: Path, records: dict[int, bytes], said: str | None = "4,24,24\n") -> Path:
    folder.mkdir(exist_ok=True)
    with RecordWriter(folder / "train.rec") as writer:
        for key, record in records.items():
            writer.write(key, record)
    if said is not None:
        (folder / "property").write_text(said)
    return folder


def examine(source: Path, **options) -> tuple[int, dict[str, dict]]:
    """(exit status, findings by key) without those that are for information, and without what is true of all of these
    small sets: they have few classes."""
    path = source.parent / f"{source.name}-report.json"
    status = doctor_data(DataOptions(source, report=path, bar=False, **options))
    report = json.loads(path.read_text())
    found = {f["key"]: f for f in report["findings"] if f["severity"] != "info"}
    assert len(found) == report["errors"] + report["warnings"]  # each key once
    found.pop("class-few", None)
    assert status == int(report["errors"] > 0)
    return status, found
