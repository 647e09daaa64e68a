from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_SCHEMA_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_PARTITION_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_SAMPLE_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_DUPLICATE_KEY: _ClassVar[ErrorCode]
    ERROR_CODE_BACKPRESSURE_TIMEOUT: _ClassVar[ErrorCode]
    ERROR_CODE_CLAIM_TIMEOUT: _ClassVar[ErrorCode]
    ERROR_CODE_LEASE_EXPIRED: _ClassVar[ErrorCode]
    ERROR_CODE_SEALED: _ClassVar[ErrorCode]
    ERROR_CODE_STORAGE_FULL: _ClassVar[ErrorCode]
    ERROR_CODE_CORRUPT_BLOCK: _ClassVar[ErrorCode]
    ERROR_CODE_UNSUPPORTED_VERSION: _ClassVar[ErrorCode]
    ERROR_CODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_TOPOLOGY_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_PARTITION_EXISTS: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_PRODUCERS_GONE: _ClassVar[ErrorCode]
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_SCHEMA_MISMATCH: ErrorCode
ERROR_CODE_PARTITION_NOT_FOUND: ErrorCode
ERROR_CODE_SAMPLE_NOT_FOUND: ErrorCode
ERROR_CODE_DUPLICATE_KEY: ErrorCode
ERROR_CODE_BACKPRESSURE_TIMEOUT: ErrorCode
ERROR_CODE_CLAIM_TIMEOUT: ErrorCode
ERROR_CODE_LEASE_EXPIRED: ErrorCode
ERROR_CODE_SEALED: ErrorCode
ERROR_CODE_STORAGE_FULL: ErrorCode
ERROR_CODE_CORRUPT_BLOCK: ErrorCode
ERROR_CODE_UNSUPPORTED_VERSION: ErrorCode
ERROR_CODE_UNAVAILABLE: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_TOPOLOGY_MISMATCH: ErrorCode
ERROR_CODE_PARTITION_EXISTS: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_PRODUCERS_GONE: ErrorCode

class Packed(_message.Message):
    __slots__ = ("data", "ends")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    ends: bytes
    def __init__(self, data: _Optional[bytes] = ..., ends: _Optional[bytes] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("node", "arena", "offset", "length", "generation")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    arena: int
    offset: int
    length: int
    generation: int
    def __init__(self, node: _Optional[str] = ..., arena: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("block_id", "extents", "directory")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    directory: bytes
    def __init__(self, block_id: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., directory: _Optional[bytes] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("ids", "keys", "groups", "version_min", "version_max", "tags", "attempts", "placements", "blocks", "id_runs", "attempt")
    IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ID_RUNS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    keys: Packed
    groups: Packed
    version_min: bytes
    version_max: bytes
    tags: Packed
    attempts: bytes
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    id_runs: bytes
    attempt: int
    def __init__(self, ids: _Optional[bytes] = ..., keys: _Optional[_Union[Packed, _Mapping]] = ..., groups: _Optional[_Union[Packed, _Mapping]] = ..., version_min: _Optional[bytes] = ..., version_max: _Optional[bytes] = ..., tags: _Optional[_Union[Packed, _Mapping]] = ..., attempts: _Optional[bytes] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., id_runs: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("fields", "block", "row", "runs")
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedScalarFieldContainer[str]
    block: bytes
    row: bytes
    runs: bytes
    def __init__(self, fields: _Optional[_Iterable[str]] = ..., block: _Optional[bytes] = ..., row: _Optional[bytes] = ..., runs: _Optional[bytes] = ...) -> None: ...

class Mutation(_message.Message):
    __slots__ = ("client_id", "request", "settled_below", "session", "settled_until", "open")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SETTLED_BELOW_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_UNTIL_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    request: int
    settled_below: int
    session: int
    settled_until: int
    open: bytes
    def __init__(self, client_id: _Optional[bytes] = ..., request: _Optional[int] = ..., settled_below: _Optional[int] = ..., session: _Optional[int] = ..., settled_until: _Optional[int] = ..., open: _Optional[bytes] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "ids", "rows", "existing_ids")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EXISTING_IDS_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    ids: bytes
    rows: bytes
    existing_ids: bytes
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., ids: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., existing_ids: _Optional[bytes] = ...) -> None: ...
