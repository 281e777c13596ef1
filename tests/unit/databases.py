"""Image databases as Caffe and Caffe2 write them, made with the runtimes themselves (protobuf, lmdb, plyvel) and with
messages declared here, apart from the reader's."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import lmdb
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

# text_format of FileDescriptorProto; types: 2 float, 3 int64, 5 int32, 8 bool, 9 string, 11 message, 12 bytes, 14 enum.
CAFFE = """
name: "caffe.proto" package: "caffe" syntax: "proto2"
message_type { name: "Datum"
  field { name: "channels" number: 1 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "height" number: 2 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "width" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "data" number: 4 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "label" number: 5 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "float_data" number: 6 label: LABEL_REPEATED type: TYPE_FLOAT }
  field { name: "encoded" number: 7 label: LABEL_OPTIONAL type: TYPE_BOOL default_value: "false" } }
"""
CAFFE2 = """
name: "NAME.proto" package: "NAME" syntax: "proto2"
message_type { name: "TensorProto"
  enum_type { name: "DataType"
    value { name: "UNDEFINED" number: 0 } value { name: "FLOAT" number: 1 } value { name: "INT32" number: 2 }
    value { name: "BYTE" number: 3 } value { name: "STRING" number: 4 } value { name: "DOUBLE" number: 13 }
    value { name: "INT64" number: 10 } }
  field { name: "dims" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
  field { name: "data_type" number: 2 label: LABEL_OPTIONAL type: TYPE_ENUM type_name: ".NAME.TensorProto.DataType"
          default_value: "FLOAT" }
  field { name: "float_data" number: 3 label: LABEL_REPEATED type: TYPE_FLOAT options { packed: PACKED } }
  field { name: "int32_data" number: 4 label: LABEL_REPEATED type: TYPE_INT32 options { packed: PACKED } }
  field { name: "byte_data" number: 5 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "string_data" number: 6 label: LABEL_REPEATED type: TYPE_BYTES }
  field { name: "name" number: 7 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "int64_data" number: 10 label: LABEL_REPEATED type: TYPE_INT64 options { packed: PACKED } } }
message_type { name: "TensorProtos"
  field { name: "protos" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".NAME.TensorProto" } }
"""
FLOAT, INT32, BYTE, STRING, INT64, DOUBLE = 1, 2, 3, 4, 10, 13


def _message(text: str, name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


Datum = _message(CAFFE, "caffe.Datum")
Packed = _message(CAFFE2.replace("NAME", "caffe2").replace("PACKED", "true"), "caffe2.TensorProtos")
Unpacked = _message(CAFFE2.replace("NAME", "caffe2u").replace("PACKED", "false"), "caffe2u.TensorProtos")


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


def tensors(image: dict[str, Any], label: dict[str, Any], *more: dict[str, Any], message: Any = Packed) -> bytes:
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


def write_lmdb(path: Path, items: dict[bytes, bytes]) -> Path:
    with lmdb.open(str(path), map_size=2**28) as environment, environment.begin(write=True) as transaction:
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


def hashes(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in folder.iterdir()
    }
