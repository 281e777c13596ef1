"""The messages that image databases hold, built at run time: caffe.Datum and caffe2.TensorProtos.

Numbers and types of the fields are those of Caffe's src/caffe/proto/caffe.proto and Caffe2's caffe2/proto/caffe2.proto.
Enumerations are int32 here and names are bytes: the same on the wire. What is not needed is left out: it is an unknown
field.
"""

from typing import Any

from partial_fc.protobuf_messages import build

# Of TensorProto.data_type.
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


_CLASSES = build("image_databases", _MESSAGES)
# Classes of protobuf's own making, which a type checker does not know.
Datum: Any = _CLASSES["Datum"]
TensorProtos: Any = _CLASSES["TensorProtos"]
