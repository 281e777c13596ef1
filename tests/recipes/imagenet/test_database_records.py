"""One record of an image database: right pixels, or an error that says what is wrong."""

from typing import Any

import numpy as np
import pytest

from partial_fc.data.decode import decode
from partial_fc.data.sample import BadRecord
from recipes.imagenet.databases.records import BYTE, FLOAT, INT32, INT64, STRING, Datum, TensorProtos, read_record
from tests.recipes.imagenet import databases
from tests.recipes.imagenet.databases import Unpacked, tensors

DOUBLE = 13
RGB = databases.picture(1)
GREY = RGB[..., :1]
IMAGE = {"data_type": BYTE, "dims": RGB.shape, "byte_data": RGB[..., ::-1].tobytes()}
LABEL = {"data_type": INT32, "int32_data": [7]}
BOX = {"data_type": INT32, "dims": [4], "int32_data": [1, 2, 3, 4]}


def check(value: bytes, expected: np.ndarray = RGB, label: int = 7) -> None:
    image, found = read_record(value)
    assert found == label
    pixels = decode(image) if isinstance(image, bytes) else image
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, expected)


def wire(number: int, content: bytes | int) -> bytes:
    """A field of a message, for small numbers."""
    if isinstance(content, int):
        return bytes([number << 3, content])
    assert len(content) < 2**14
    return bytes([number << 3 | 2, len(content) & 0x7F | 0x80, len(content) >> 7]) + content


def test_datum() -> None:
    check(databases.datum(RGB, 7))
    check(databases.datum(RGB, 7, encoded=True))
    check(databases.datum(GREY, 7), GREY)


def test_datum_with_its_fields_in_any_order() -> None:
    data = RGB[..., ::-1].transpose(2, 0, 1).tobytes()
    fields = [wire(1, 3), wire(2, 5), wire(3, 7), wire(4, data), wire(5, 7), wire(7, 0), wire(6, b"")]
    for first in range(len(fields)):
        check(b"".join(fields[first:] + fields[:first]))


def test_tensors() -> None:
    check(databases.raw_tensors(RGB, 7))
    check(databases.encoded_tensors(RGB, 7))
    # The bytes that Caffe2 writes for an image of six bytes (docs of its format).
    assert read_record(bytes.fromhex("0a0c080110043206ffd84a5045470a0708011002220107")) == (b"\xff\xd8JPEG", 7)


@pytest.mark.parametrize("dims", [(5, 7), (5, 7, 1), (1, 5, 7)])
def test_grey_tensors(dims: tuple[int, ...]) -> None:
    check(tensors({"data_type": BYTE, "dims": dims, "byte_data": GREY.tobytes()}, LABEL), GREY)


@pytest.mark.parametrize("message", [TensorProtos, Unpacked])
@pytest.mark.parametrize(
    "label",
    [
        {"data_type": INT32, "int32_data": [300]},
        {"data_type": INT64, "int64_data": [300], "dims": [1]},
        {"data_type": FLOAT, "float_data": [300.0]},
        {"float_data": [300.0]},  # FLOAT is the default
    ],
)
def test_labels_packed_and_unpacked(message: Any, label: dict[str, Any]) -> None:
    check(tensors(IMAGE, label, message=message), label=300)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "the value is empty"),
        (b"\xff\xd8\xff\xe0 a JPEG", "neither a Datum nor TensorProtos"),
        (databases.datum(RGB, 7)[:20], "begin as a Datum and are none: cut short"),
        (databases.encoded_tensors(RGB, 7)[:-3], "begin as a TensorProtos and are none"),
        (databases.datum(RGB, 7)[:-2], "without a label"),
        (Datum(channels=3, label=7).SerializeToString(), "without data"),
        (Datum(data=b"123", label=7, channels=3, height=1, width=2).SerializeToString(), "3 x 1 x 2 has 3 bytes"),
        (Datum(data=b"12", label=7, channels=2, height=1, width=1).SerializeToString(), "2 channels"),
        (Datum(float_data=[1, 2], label=7).SerializeToString(), "2 floats: features"),
        (Datum(data=databases.png(RGB), label=7).SerializeToString(), "of 0 x 0 x 0 has"),
        (databases.datum(RGB, -1), "label -1"),
        (tensors(IMAGE, {"data_type": INT32}), r"INT32 \[\]; expected one whole"),
        (tensors(IMAGE, {"data_type": INT32, "int32_data": [1, 2]}), r"INT32 \[1, 2\]"),
        (tensors(IMAGE, {"data_type": FLOAT, "float_data": [1.5]}), r"FLOAT \[1.5\]"),
        (tensors(IMAGE, {"data_type": FLOAT, "float_data": [float("nan")]}), r"FLOAT \[nan\]"),
        (tensors(IMAGE, {"data_type": DOUBLE}), "the label is data_type 13"),
        (tensors({"data_type": FLOAT, "dims": [3, 2, 2], "float_data": [0.5] * 12}, LABEL), "lmdb_create_example"),
        (tensors({"data_type": BYTE, "dims": [3, 2, 5], "byte_data": bytes(30)}, LABEL), r"\(3, 2, 5\); expected"),
        (tensors({"data_type": BYTE, "dims": [2, 2, 3], "byte_data": bytes(30)}, LABEL), "2 x 2 x 3 has 30"),
        (tensors({"data_type": BYTE, "byte_data": bytes(30)}, LABEL), "no size has 30"),
        (tensors({"data_type": STRING}, LABEL), "STRING of 0 parts"),
        (tensors({"data_type": STRING, "string_data": [b"a", b"b"]}, LABEL), "STRING of 2 parts"),
        (TensorProtos(protos=[IMAGE]).SerializeToString(), "with 1 tensors"),
        (tensors(IMAGE, LABEL, BOX), "with 3 tensors"),
    ],
)
def test_what_cannot_be_used(value: bytes, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        read_record(value)
