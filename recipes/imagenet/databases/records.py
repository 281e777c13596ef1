"""Decoder of one record of an image database: image and label.

Two messages occur, and each parses as the other without an error, empty. The first byte tells them apart, record by
record: TensorProtos has one field, number 1 of bytes (0x0a); in a Datum that number is an integer.

    Datum         encoded: an image file. Otherwise uint8 (C, H, W), C 1 or 3, BGR.
    TensorProtos  image, label. Image: STRING, an image file; BYTE, uint8 (H, W, 3) BGR, (H, W, 1), (H,
                  W), or (1, H, W), as make_mnist_db --channel_first writes it. Label: INT32, INT64 or FLOAT, one
                  number.

(As in Caffe2's caffe2/image/image_input_op.h.)
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from partial_fc.data.sample import BadRecord

_Field = descriptor_pb2.FieldDescriptorProto


def build_messages(package: str, messages: Mapping[str, Sequence[tuple[int, str, str]]]) -> dict[str, Any]:
    """Builds classes from message -> (number, name, type) of its proto2 fields; returns message -> class.

    A type is a protobuf type or a message of the table, then "*" if repeated, " packed" if packed, or "=" and the
    default. Enumerations may be int32 and strings bytes: the same encoding. Omitted fields are unknown ones.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for message, fields in messages.items():
        descriptor = file.message_type.add(name=message)
        for number, name, notation in fields:
            kind, has_default, default = notation.partition("=")
            plain = kind.removesuffix("*").removesuffix(" packed")
            field = descriptor.field.add(name=name, number=number)
            field.label = _Field.LABEL_OPTIONAL if plain == kind else _Field.LABEL_REPEATED
            field.options.packed = kind.endswith(" packed")
            if has_default:
                field.default_value = default
            if plain in messages:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{plain}"
            else:
                field.type = _Field.Type.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{package}.{name}") for name in messages}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


# Field numbers and types of Caffe's src/caffe/proto/caffe.proto and Caffe2's caffe2/proto/caffe2.proto; enumerations
# are int32 and strings bytes, the same encoding; unneeded fields are omitted. The first five are values of
# TensorProto.data_type.
FLOAT, INT32, BYTE, STRING, INT64 = 1, 2, 3, 4, 10

_MESSAGES = {
    "Datum": [
        (1, "channels", "int32"),
        (2, "height", "int32"),
        (3, "width", "int32"),
        (4, "data", "bytes"),
        (5, "label", "int32"),
        (6, "float_data", "float*"),
        (7, "encoded", "bool"),
    ],
    "TensorProto": [
        (1, "dims", "int64*"),
        (2, "data_type", f"int32={FLOAT}"),
        (3, "float_data", "float packed"),
        (4, "int32_data", "int32 packed"),
        (5, "byte_data", "bytes"),
        (6, "string_data", "bytes*"),
        (10, "int64_data", "int64 packed"),
    ],
    "TensorProtos": [(1, "protos", "TensorProto*")],
}
_CLASSES = build_messages("image_databases", _MESSAGES)
# Classes built at run time, unknown to the type checker.
Datum: Any = _CLASSES["Datum"]
TensorProtos: Any = _CLASSES["TensorProtos"]

Image = bytes | NDArray[np.uint8]

_TENSORS = 0x0A
_DATUM = (0x08, 0x10, 0x18, 0x22, 0x28, 0x32, 0x35, 0x38)  # fields may be in any order
_NAMES = {FLOAT: "FLOAT", INT32: "INT32", BYTE: "BYTE", STRING: "STRING", INT64: "INT64"}


def read_record(value: bytes) -> tuple[Image, int]:
    """Returns (an image file, or uint8 pixels (H, W, 3) RGB or (H, W, 1) grey; label, 0 or more). Raises BadRecord."""
    if not value:
        raise BadRecord("the value is empty; expected a Datum or TensorProtos")
    first = value[0]
    if first != _TENSORS and first not in _DATUM:
        raise BadRecord(
            f"{len(value)} bytes, starting {value[:8].hex(' ')}: neither a Datum nor TensorProtos; expected 0a or one "
            f"of {' '.join(f'{byte:02x}' for byte in _DATUM)} first"
        )
    name, message = ("TensorProtos", TensorProtos) if first == _TENSORS else ("Datum", Datum)
    try:
        record = message.FromString(value)
    except DecodeError:
        raise BadRecord(f"{len(value)} bytes that begin as a {name} and are none: cut short or damaged") from None
    image, label = _tensors(record) if first == _TENSORS else _datum(record)
    if label < 0:
        raise BadRecord(f"label {label}; expected 0 or more")
    return image, label


def _datum(datum: Any) -> tuple[Image, int]:
    if not datum.HasField("label"):
        raise BadRecord("a Datum without a label: cut short, or of a set that has none")
    if datum.float_data:
        raise BadRecord(f"a Datum of {len(datum.float_data)} floats: features, no image")
    data: bytes = datum.data
    if not data:
        raise BadRecord("a Datum without data: no image in it")
    if datum.encoded:
        return data, datum.label
    shape = (datum.channels, datum.height, datum.width)
    pixel_CHW = _pixels(data, shape, "a Datum that is not `encoded`")
    if shape[0] not in (1, 3):
        raise BadRecord(f"a Datum of {shape[0]} channels; expected 1 or 3")
    return np.ascontiguousarray(pixel_CHW[::-1].transpose(1, 2, 0)), datum.label


def _tensors(record: Any) -> tuple[Image, int]:
    protos = record.protos
    if len(protos) != 2:
        raise BadRecord(f"TensorProtos with {len(protos)} tensors; expected image and label")
    return _image(protos[0]), _label(protos[1])


def _image(proto: Any) -> Image:
    if proto.data_type == STRING:
        if len(proto.string_data) != 1 or not proto.string_data[0]:
            raise BadRecord(f"the image is a STRING of {len(proto.string_data)} parts; expected one, not empty")
        return proto.string_data[0]
    shape = tuple(proto.dims)
    if proto.data_type != BYTE:
        kind = _NAMES.get(proto.data_type, f"data_type {proto.data_type}")
        made_by = " (lmdb_create_example.py writes such)" if proto.data_type == FLOAT else ""
        raise BadRecord(
            f"the image is {kind} {shape}{made_by}; expected STRING, an image file, or BYTE: write it as one of these"
        )
    pixel = _pixels(proto.byte_data, shape, "a BYTE image")
    if len(shape) == 2:
        return pixel[..., None]
    if len(shape) == 3 and shape[2] in (1, 3):
        return np.ascontiguousarray(pixel[..., ::-1])
    if len(shape) == 3 and shape[0] == 1:
        return pixel[0][..., None]
    raise BadRecord(f"a BYTE image of {shape}; expected (H, W, 3), (H, W, 1), (H, W) or (1, H, W)")


def _pixels(data: bytes, shape: tuple[int, ...], what: str) -> NDArray[np.uint8]:
    if not shape or min(shape) < 1 or math.prod(shape) != len(data):
        raise BadRecord(f"{what} of {' x '.join(map(str, shape)) or 'no size'} has {len(data)} bytes of pixels")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _label(proto: Any) -> int:
    values = {INT32: proto.int32_data, INT64: proto.int64_data, FLOAT: proto.float_data}.get(proto.data_type)
    if values is None:
        kind = _NAMES.get(proto.data_type, f"data_type {proto.data_type}")
        raise BadRecord(f"the label is {kind}; expected INT32, INT64 or FLOAT")
    if len(values) != 1 or not float(values[0]).is_integer():
        shown = ", ".join(map(str, values[:5]))
        raise BadRecord(f"the label is {_NAMES[proto.data_type]} [{shown}]; expected one whole number")
    return int(values[0])
