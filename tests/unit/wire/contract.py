"""The wire contract as sorted lines, one per promise to an older peer or an older journal.

python -m tests.unit.wire.contract      adds what is new to the golden file; it never takes a line out

A line that has to go breaks someone: raise limits.WIRE_VERSION, name who breaks in CHANGELOG.md, delete it by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from tqclient.wire.v1 import common_pb2, controller_pb2, journal_pb2, lane_pb2, storage_pb2

GOLDEN = Path(__file__).parents[2] / "golden" / "wire_v1.txt"
MODULES = (common_pb2, controller_pb2, journal_pb2, lane_pb2, storage_pb2)


def files() -> list[FileDescriptorProto]:
    """The descriptors of the stubs that are in use."""
    protos = []
    for module in MODULES:
        proto = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(proto)
        protos.append(proto)
    return protos


def lines(protos: list[FileDescriptorProto]) -> set[str]:
    """What these files promise."""
    return {line for proto in protos for line in _of_file(proto)}


def _of_file(proto: FileDescriptorProto) -> Iterator[str]:
    for message in proto.message_type:
        yield from _of_message(message, f"{proto.package}.{message.name}")
    for enum in proto.enum_type:
        yield from (f"enum {proto.package}.{enum.name} {value.number} {value.name}" for value in enum.value)
    for service in proto.service:
        for rpc in service.method:
            request = "stream " * rpc.client_streaming + rpc.input_type.lstrip(".")
            reply = "stream " * rpc.server_streaming + rpc.output_type.lstrip(".")
            yield f"rpc {proto.package}.{service.name}/{rpc.name} ({request}) returns ({reply})"


def _of_message(message: DescriptorProto, path: str) -> Iterator[str]:
    yield f"message {path}"
    for field in message.field:
        yield f"field {path} {field.number} {field.name}: {_type(message, field)}"
    for reserved in message.reserved_range:
        yield f"reserved {path} {reserved.start}..{reserved.end - 1}"
    for enum in message.enum_type:
        yield from (f"enum {path}.{enum.name} {value.number} {value.name}" for value in enum.value)
    for nested in message.nested_type:
        yield from _of_message(nested, f"{path}.{nested.name}")


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    name = field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name} in oneof {message.oneof_decl[field.oneof_index].name}"
    return name


if __name__ == "__main__":
    promised = set(GOLDEN.read_text().splitlines()) if GOLDEN.exists() else set()
    GOLDEN.write_text("".join(f"{line}\n" for line in sorted(promised | lines(files()))))
