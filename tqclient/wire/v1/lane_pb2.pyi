from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class FindLaneRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindLaneReply(_message.Message):
    __slots__ = ("name", "secret")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    name: str
    secret: bytes
    def __init__(self, name: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...
