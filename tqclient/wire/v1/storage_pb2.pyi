from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeNodeReply(_message.Message):
    __slots__ = ("name", "arena", "incarnation", "arena_path", "arena_bytes", "data_offset", "segment_bytes", "capacity_bytes", "sealed_bytes", "reserved_bytes", "quarantined_bytes", "prefaulted_bytes", "controller_sequence", "attached", "mooncake", "mooncake_refusal", "mooncake_expected", "arena_removed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFAULTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ARENA_REMOVED_FIELD_NUMBER: _ClassVar[int]
    name: str
    arena: int
    incarnation: int
    arena_path: str
    arena_bytes: int
    data_offset: int
    segment_bytes: int
    capacity_bytes: int
    sealed_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    prefaulted_bytes: int
    controller_sequence: int
    attached: bool
    mooncake: MooncakeEndpoint
    mooncake_refusal: str
    mooncake_expected: bool
    arena_removed: bool
    def __init__(self, name: _Optional[str] = ..., arena: _Optional[int] = ..., incarnation: _Optional[int] = ..., arena_path: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., data_offset: _Optional[int] = ..., segment_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., sealed_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., prefaulted_bytes: _Optional[int] = ..., controller_sequence: _Optional[int] = ..., attached: _Optional[bool] = ..., mooncake: _Optional[_Union[MooncakeEndpoint, _Mapping]] = ..., mooncake_refusal: _Optional[str] = ..., mooncake_expected: _Optional[bool] = ..., arena_removed: _Optional[bool] = ...) -> None: ...

class MooncakeEndpoint(_message.Message):
    __slots__ = ("segment", "base", "registered_bytes", "protocol", "registrations", "gather", "gather_secret")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    REGISTRATIONS_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    GATHER_SECRET_FIELD_NUMBER: _ClassVar[int]
    segment: str
    base: int
    registered_bytes: int
    protocol: str
    registrations: int
    gather: str
    gather_secret: int
    def __init__(self, segment: _Optional[str] = ..., base: _Optional[int] = ..., registered_bytes: _Optional[int] = ..., protocol: _Optional[str] = ..., registrations: _Optional[int] = ..., gather: _Optional[str] = ..., gather_secret: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "partition_id", "length", "mapped", "segment", "ticket", "tickets_below")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TICKETS_BELOW_FIELD_NUMBER: _ClassVar[int]
    session: int
    partition_id: int
    length: int
    mapped: bool
    segment: str
    ticket: int
    tickets_below: int
    def __init__(self, session: _Optional[int] = ..., partition_id: _Optional[int] = ..., length: _Optional[int] = ..., mapped: _Optional[bool] = ..., segment: _Optional[str] = ..., ticket: _Optional[int] = ..., tickets_below: _Optional[int] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("offset", "length", "generation", "incarnation")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    generation: int
    incarnation: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., generation: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class CloseWindowRequest(_message.Message):
    __slots__ = ("session", "generation", "end", "more", "tickets")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    end: int
    more: bytes
    tickets: bytes
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., end: _Optional[int] = ..., more: _Optional[bytes] = ..., tickets: _Optional[bytes] = ...) -> None: ...

class CloseWindowReply(_message.Message):
    __slots__ = ("all",)
    ALL_FIELD_NUMBER: _ClassVar[int]
    all: bool
    def __init__(self, all: _Optional[bool] = ...) -> None: ...

class WriteChunk(_message.Message):
    __slots__ = ("session", "generation", "incarnation", "offset", "length", "data")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    incarnation: int
    offset: int
    length: int
    data: bytes
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., incarnation: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: bytes
    def __init__(self, ranges: _Optional[bytes] = ...) -> None: ...

class ReadChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
