"""Message classes of protobuf's runtime from a table of their fields: no compiler, no generated files."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto


def build(package: str, messages: Mapping[str, Sequence[tuple[int, str, str]]]) -> dict[str, Any]:
    """Message -> (number, name, type) of its fields, as proto2 has them; gives message -> class.

    A type is protobuf's word for it or a message of the table, then "*" where it is repeated, " packed" where it is
    repeated in one piece, or "=" and what a field is that is not there. Enumerations may be int32, names bytes: the
    same on the wire. Fields left out are unknown ones. Packed numbers of fixed size may be "bytes": their bytes,
    little-endian, with nothing to convert.
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
