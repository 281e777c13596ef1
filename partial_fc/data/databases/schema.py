"""The messages that image databases hold, built at run time: caffe.Datum and caffe2.TensorProtos.

Numbers and types of the fields are those of Caffe's src/caffe/proto/caffe.proto and Caffe2's caffe2/proto/caffe2.proto.
Enumerations are int32 here and names are bytes: the same on the wire. What is not needed is left out: it is an unknown
field.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Of TensorProto.data_type.
FLOAT, INT32, BYTE, STRING, INT64 = 1, 2, 3, 4, 10

_Field = descriptor_pb2.FieldDescriptorProto
# Message -> (number, name, type) of its fields. "*": repeated; "packed": repeated, in one piece, as it is written. A
# reader of protobuf takes either.
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
        (2, "data_type", "int32"),
        (3, "float_data", "float packed"),
        (4, "int32_data", "int32 packed"),
        (5, "byte_data", "bytes"),
        (6, "string_data", "bytes*"),
        (10, "int64_data", "int64 packed"),
    ],
    "TensorProtos": [(1, "protos", "TensorProto*")],
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="image_databases.proto", package="image_databases", syntax="proto2")
    for message, fields in _MESSAGES.items():
        descriptor = file.message_type.add(name=message)
        for number, name, kind in fields:
            plain = kind.removesuffix("*").removesuffix(" packed")
            field = descriptor.field.add(name=name, number=number)
            field.label = _Field.LABEL_OPTIONAL if plain == kind else _Field.LABEL_REPEATED
            field.options.packed = kind.endswith(" packed")
            if plain in _MESSAGES:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".image_databases.{plain}"
            else:
                field.type = _Field.Type.Value(f"TYPE_{plain.upper()}")
            if name == "data_type":
                field.default_value = str(FLOAT)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"image_databases.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _build()
# Classes of protobuf's own making, which a type checker does not know.
Datum: Any = _CLASSES["Datum"]
TensorProtos: Any = _CLASSES["TensorProtos"]
