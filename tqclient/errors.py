"""Every error that the client raises and the daemons answer with.

    TQError
    ├── InvalidArgument (also a ValueError)      the call's arguments are off
    ├── UnsupportedValue (also a TypeError)      a value that the block format cannot carry
    ├── SchemaMismatch                           a value that does not fit its column
    ├── PartitionNotFound (also a KeyError)
    ├── PartitionExists
    ├── SampleNotFound (also a KeyError)         never was, was cleared, or lacks a field
    ├── DuplicateKey
    ├── BackpressureTimeout (also a TimeoutError)
    ├── ClaimTimeout (also a TimeoutError)
    ├── LeaseExpired                             a session, claim or view outlived its lease
    ├── Sealed                                   no more samples: nothing to put to, nothing left to claim
    ├── StorageFull
    ├── CorruptBlock
    ├── UnsupportedVersion
    ├── TransportUnavailable                     a required path cannot be had
    ├── Unavailable                              a daemon is away; retried until the call's deadline
    ├── Unauthenticated
    ├── TopologyMismatch
    └── InternalError                            a fault of this software

`retryable` says whether the same call may succeed later without a change of its arguments.
A daemon sends the class as a code (see `tqclient.wire.status`); no text is ever parsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class TQError(Exception):
    """The root of the tree.

    Attributes:
        message: what was wrong, where (partition, field, row, path) and what to do.
        ids: int sample ids concerned; may be empty, and is cut at `limits.ERROR_IDS_MAX`.
        rows: int rows of the request concerned; may be empty, likewise cut.
        existing_ids: for `DuplicateKey`, per entry of `rows`, the sample that has the key already.
    """

    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        ids: Sequence[int] = (),
        rows: Sequence[int] = (),
        existing_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.ids = tuple(ids)
        self.rows = tuple(rows)
        self.existing_ids = tuple(existing_ids)

    def __str__(self) -> str:
        return self.message  # a KeyError would print its repr


class InvalidArgument(TQError, ValueError):
    """The call's arguments are off; nothing was done."""


class UnsupportedValue(TQError, TypeError):
    """A value cannot be carried exactly; the message gives its path (`extra[3].callback`)."""


class SchemaMismatch(TQError):
    """A value does not fit the column's form, dtype or trailing shape, which the first put fixed."""


class PartitionNotFound(TQError, KeyError):
    """No partition has that name, or it was deleted since."""


class PartitionExists(TQError):
    """A partition of that name exists, and `exist_ok` was not given or the policies differ."""


class SampleNotFound(TQError, KeyError):
    """A sample does not exist, was cleared, or lacks a requested field."""


class DuplicateKey(TQError):
    """A key, or a field of a sample, exists already with other bytes. The first value is intact."""


class BackpressureTimeout(TQError, TimeoutError):
    """The partition stayed over its limits until the deadline. Nothing was put."""

    retryable = True


class ClaimTimeout(TQError, TimeoutError):
    """Too few samples were ready until the deadline. Nothing was claimed."""

    retryable = True


class ProducersGone(TQError):
    """A claim waits for samples, and every producer that registered with the partition has died."""


class LeaseExpired(TQError):
    """A session, a claim or a view outlived its lease; its samples are redelivered."""


class Sealed(TQError):
    """The partition takes no more samples; or, for a claim, there is nothing left to deliver."""


class StorageFull(TQError):
    """No storage node, or the controller's journal, has room."""

    retryable = True


class CorruptBlock(TQError):
    """Stored bytes fail their bounds or checksums. Wrong bytes are never returned."""


class UnsupportedVersion(TQError):
    """The other side is too old or too new for what was asked."""


class TransportUnavailable(TQError):
    """The transport that was required cannot be had; the message says why."""


class Unavailable(TQError, ConnectionError):
    """A daemon is away, or did not answer before the call's deadline."""

    retryable = True


class Unauthenticated(TQError):
    """The token or certificate was refused."""


class TopologyMismatch(TQError):
    """The ranks that were registered do not fit the declared sizes."""


class InternalError(TQError):
    """A daemon met a fault of its own; its log has the trace."""
