"""Message classes of the protobuf runtime, built from a table of fields without a compiler or generated files."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto


def build(package: str, messages: Mapping[str, Sequence[tuple[int, str, str]]]) -> dict[str, Any]:
    """Builds classes from message -> (number, name, type) of its proto2 fields; returns message -> class.

    A type is a protobuf type or a message of the table, then "*" if repeated, " packed" if packed, or "=" and the
    default. Enumerations may be int32 and strings bytes: the same encoding. Omitted fields are unknown ones. Packed
    numbers of fixed size may be "bytes", their little-endian bytes, which need no conversion.
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
