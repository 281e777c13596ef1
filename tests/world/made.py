"""Made-up pictures, folders and records, written by hand: by none of the writers that the product has."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import cv2
import numpy as np

_MAGIC = 0xCED7230A


def picture(cls: int, number: int, size: tuple[int, int] = (40, 40)) -> np.ndarray:
    """Returns a picture that tells its class and number, uint8 (H, W, 3); size: H, W."""
    height, width = size
    base = np.random.default_rng(cls).integers(0, 255, (5, 5, 3)).astype(np.uint8)
    large = cv2.resize(base, (width, height), interpolation=cv2.INTER_NEAREST).astype(int)
    noise = np.random.default_rng([cls, number]).normal(0, 10, large.shape)
    return np.clip(large + noise, 0, 255).astype(np.uint8)


def image(cls: int, number: int, size: tuple[int, int] = (40, 40), ending: str = ".jpg") -> bytes:
    """Returns the bytes of a picture file."""
    return cv2.imencode(ending, picture(cls, number, size))[1].tobytes()


def class_folders(folder: Path, classes: int = 12, images: int = 4, size: tuple[int, int] = (40, 40)) -> Path:
    """Writes folder/id003/2.jpg ... and returns the folder."""
    for cls in range(classes):
        (folder / f"id{cls:03d}").mkdir(parents=True)
        for number in range(images):
            (folder / f"id{cls:03d}" / f"{number}.jpg").write_bytes(image(cls, number, size))
    return folder


def record(key: int, label: float | Sequence[float], content: bytes) -> bytes:
    """Returns the body of a record as mx.recordio.pack writes it."""
    if isinstance(label, Sequence):
        return struct.pack("<IfQQ", len(label), 0.0, key, 0) + struct.pack(f"<{len(label)}f", *label) + content
    return struct.pack("<IfQQ", 0, label, key, 0) + content


def write_rec(folder: Path, records: Iterable[tuple[int, float | Sequence[float], bytes]], name: str = "train") -> Path:
    """Writes NAME.rec and NAME.idx of (key, label, content), and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.rec", "wb") as rec, open(folder / f"{name}.idx", "w") as idx:
        for key, label, content in records:
            body = record(key, label, content)
            idx.write(f"{key}\t{rec.tell()}\n")
            rec.write(struct.pack("<II", _MAGIC, len(body)) + body + bytes(-len(body) % 4))
    return folder
