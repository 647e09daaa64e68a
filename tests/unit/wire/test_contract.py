"""A change of the proto files must leave older peers and older journals able to read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from tests.unit.wire import contract
from tqclient.wire.v1 import controller_pb2

PROMISED = set(contract.GOLDEN.read_text().splitlines())


def test_nothing_that_was_promised_is_gone_or_changed() -> None:
    broken = sorted(PROMISED - contract.lines(contract.files()))
    assert not broken, f"an older peer relies on these; see {contract.__name__}"


def test_the_golden_file_has_every_addition() -> None:
    new = sorted(contract.lines(contract.files()) - PROMISED)
    assert not new, "run `make proto` to promise these"


def test_every_enum_begins_with_unspecified() -> None:
    enums = [enum for module in contract.MODULES for enum in module.DESCRIPTOR.enum_types_by_name.values()]
    assert {enum.name for enum in enums} >= {"ErrorCode", "Verdict"}
    for enum in enums:
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED"), enum.full_name


def test_every_journaled_command_but_the_controllers_own_is_a_mutation() -> None:
    own = {"end_session", "expire_claim", "attach_node", "start", "dissolve_replica", "complete_ranks", "chosen_ids"}
    body = next(proto for proto in contract.files() if proto.name.endswith("journal.proto")).message_type[0]
    requests = [field.type_name.split(".")[-1] for field in body.field if field.name not in own]
    for request in requests:
        assert getattr(controller_pb2, request).DESCRIPTOR.fields_by_name["mutation"].number == 1


def _controller() -> FileDescriptorProto:
    return next(proto for proto in contract.files() if proto.name.endswith("controller.proto"))


def _message(proto: FileDescriptorProto, name: str) -> list[FieldDescriptorProto]:
    return next(message for message in proto.message_type if message.name == name).field  # type: ignore[return-value]


def _remove_field(proto: FileDescriptorProto) -> None:
    del _message(proto, "ClaimRequest")[-1]


def _renumber(proto: FileDescriptorProto) -> None:
    _message(proto, "ClaimRequest")[-1].number = 99


def _retype(proto: FileDescriptorProto) -> None:
    _message(proto, "ClaimRequest")[4].type = FieldDescriptorProto.TYPE_STRING


def _repeat(proto: FileDescriptorProto) -> None:
    _message(proto, "ClaimRequest")[-1].label = FieldDescriptorProto.LABEL_REPEATED


def _change_enum(proto: FileDescriptorProto) -> None:
    proto.enum_type[0].value[1].number = 7


def _stream(proto: FileDescriptorProto) -> None:
    proto.service[0].method[0].server_streaming = True


def _remove_rpc(proto: FileDescriptorProto) -> None:
    del proto.service[0].method[0]


BREAKS = [_remove_field, _renumber, _retype, _repeat, _change_enum, _stream, _remove_rpc]


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.__name__.strip("_"))
def test_a_breaking_change_is_noticed(change: Callable[[FileDescriptorProto], None]) -> None:
    before, after = _controller(), _controller()
    change(after)
    assert contract.lines([before]) - contract.lines([after])


def test_an_addition_is_allowed() -> None:
    before, after = _controller(), _controller()
    after.message_type[0].field.add(name="later", number=100, type=FieldDescriptorProto.TYPE_BYTES)
    after.message_type.add(name="LaterRequest")
    assert contract.lines([before]) < contract.lines([after])
