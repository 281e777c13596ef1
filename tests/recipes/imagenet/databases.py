"""Image databases as Caffe and Caffe2 write them, made with the runtimes themselves (protobuf, lmdb,
plyvel)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from recipes.imagenet.databases.records import BYTE, INT32, STRING, Datum, TensorProtos, build_messages

# Numbers may also be written unpacked.
_FIELDS = [
    (1, "dims", "int64*"),
    (2, "data_type", "int32=1"),
    (3, "float_data", "float*"),
    (4, "int32_data", "int32*"),
    (5, "byte_data", "bytes"),
    (6, "string_data", "bytes*"),
    (10, "int64_data", "int64*"),
]
Unpacked = build_messages("test_unpacked", {"TensorProto": _FIELDS, "TensorProtos": [(1, "protos", "TensorProto*")]})[
    "TensorProtos"
]


def picture(number: int, height: int = 5, width: int = 7) -> np.ndarray:
    """RGB; every pixel and channel differs."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def png(rgb: np.ndarray) -> bytes:
    return cv2.imencode(".png", rgb[..., ::-1])[1].tobytes()


def datum(rgb: np.ndarray, label: int, encoded: bool = False) -> bytes:
    height, width, channels = rgb.shape
    if encoded:
        return Datum(data=png(rgb), label=label, encoded=True).SerializeToString()
    data = rgb[..., ::-1].transpose(2, 0, 1).tobytes()
    return Datum(channels=channels, height=height, width=width, data=data, label=label).SerializeToString()


def tensors(image: dict[str, Any], label: dict[str, Any], *more: dict[str, Any], message: Any = TensorProtos) -> bytes:
    return message(protos=[image, label, *more]).SerializeToString()


def raw_tensors(rgb: np.ndarray, label: int) -> bytes:
    image = {"data_type": BYTE, "dims": rgb.shape, "byte_data": rgb[..., ::-1].tobytes()}
    return tensors(image, {"data_type": INT32, "int32_data": [label]})


def encoded_tensors(rgb: np.ndarray, label: int) -> bytes:
    image = {"data_type": STRING, "dims": [1], "string_data": [png(rgb)]}
    return tensors(image, {"data_type": INT32, "dims": [1], "int32_data": [label]})


def records(count: int, size: int = 5) -> dict[bytes, bytes]:
    """Of all four kinds in turn; record i is picture(i) with label i % 10."""
    kinds = (datum, lambda rgb, label: datum(rgb, label, True), raw_tensors, encoded_tensors)
    return {b"%08d_%d.png" % (i, i): kinds[i % 4](picture(i, size, size), i % 10) for i in range(count)}


def write_lmdb(path: Path, items: dict[bytes, bytes], **options: Any) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(path), map_size=2**28, **options) as environment, environment.begin(write=True) as transaction:
        for key, value in items.items():
            transaction.put(key, value)
    return path


def write_leveldb(path: Path, items: Iterable[tuple[bytes, bytes]], **options: Any) -> Path:
    plyvel = pytest.importorskip("plyvel")
    database = plyvel.DB(str(path), create_if_missing=True, **options)
    for key, value in items:
        database.put(key, value)
    database.close()
    return path
