"""Error class ↔ wire code ↔ gRPC status: the one table that both sides read."""

from __future__ import annotations

from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from tqclient import errors, limits
from tqclient.errors import TQError
from tqclient.wire.packing import I64, U32, pack_array, unpack_array
from tqclient.wire.v1 import common_pb2 as pb

DETAIL_KEY: Final = "tq-error-bin"

_Row = tuple[type[TQError], pb.ErrorCode, grpc.StatusCode]

TABLE: Final[tuple[_Row, ...]] = (
    (errors.InvalidArgument, pb.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.SchemaMismatch, pb.ERROR_CODE_SCHEMA_MISMATCH, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.PartitionNotFound, pb.ERROR_CODE_PARTITION_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    (errors.PartitionExists, pb.ERROR_CODE_PARTITION_EXISTS, grpc.StatusCode.ALREADY_EXISTS),
    (errors.SampleNotFound, pb.ERROR_CODE_SAMPLE_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    (errors.DuplicateKey, pb.ERROR_CODE_DUPLICATE_KEY, grpc.StatusCode.ALREADY_EXISTS),
    (errors.BackpressureTimeout, pb.ERROR_CODE_BACKPRESSURE_TIMEOUT, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ClaimTimeout, pb.ERROR_CODE_CLAIM_TIMEOUT, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.ProducersGone, pb.ERROR_CODE_PRODUCERS_GONE, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.LeaseExpired, pb.ERROR_CODE_LEASE_EXPIRED, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Sealed, pb.ERROR_CODE_SEALED, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StorageFull, pb.ERROR_CODE_STORAGE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.CorruptBlock, pb.ERROR_CODE_CORRUPT_BLOCK, grpc.StatusCode.DATA_LOSS),
    (errors.UnsupportedVersion, pb.ERROR_CODE_UNSUPPORTED_VERSION, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Unavailable, pb.ERROR_CODE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    (errors.Unauthenticated, pb.ERROR_CODE_UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED),
    (errors.TopologyMismatch, pb.ERROR_CODE_TOPOLOGY_MISMATCH, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.InternalError, pb.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL),
)

_BY_CLASS: Final = {row[0]: row for row in TABLE}
_BY_CODE: Final = {row[1]: row[0] for row in TABLE}
# What a status without a detail means: the peer is no tq daemon, or gRPC itself answered.
_BY_STATUS: Final[dict[grpc.StatusCode, type[TQError]]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedVersion,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
}
_HINTS: Final = (
    # What gRPC says of a connection that came about, and what is most likely behind it.
    (
        "Socket closed",
        "whoever listens there hung up: it may speak TLS, or want a certificate that its CA has signed and that has "
        "not expired",
    ),
    ("WRONG_VERSION_NUMBER", "whoever listens there does not speak TLS"),
)


def _row_of(error: TQError) -> _Row:
    return next(row for base in (*type(error).__mro__, errors.InternalError) if (row := _BY_CLASS.get(base)))


def status_of(error: TQError) -> grpc.StatusCode:
    """Returns the gRPC status that a daemon answers with for this error."""
    return _row_of(error)[2]


def to_detail(error: TQError) -> pb.ErrorDetail:
    """Returns the error as it crosses the wire; a class that is not in the table travels as its nearest base."""
    cut = slice(limits.ERROR_IDS_MAX)
    return pb.ErrorDetail(
        code=_row_of(error)[1],
        message=error.message,
        ids=pack_array(error.ids[cut], I64),
        rows=pack_array(error.rows[cut], U32),
        existing_ids=pack_array(error.existing_ids[cut], I64),
    )


def from_detail(detail: pb.ErrorDetail) -> TQError:
    """Returns the error that a daemon sent; a code that this version does not know becomes InternalError."""
    cls = _BY_CODE.get(detail.code, errors.InternalError)
    return cls(
        detail.message,
        ids=unpack_array(detail.ids, I64, what="ids").tolist(),
        rows=unpack_array(detail.rows, U32, what="rows").tolist(),
        existing_ids=unpack_array(detail.existing_ids, I64, what="existing_ids").tolist(),
    )


def from_rpc_error(error: grpc.RpcError, *, peer: str) -> TQError:
    """Returns what a failed call of a sync or aio stub means.

    Args:
        error: as the stub raised it.
        peer: who was called, for the message: `controller 127.0.0.1:7700`.
    """
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == DETAIL_KEY:
            try:
                return from_detail(pb.ErrorDetail.FromString(value))
            except (DecodeError, errors.InvalidArgument):
                break
    status = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = error.details() if hasattr(error, "details") else str(error)
    cls = _BY_STATUS.get(status, errors.InternalError)
    return cls(f"{peer}: {status.name}: {details}{_hint(details)}")


def _hint(details: str | None) -> str:
    """Returns what is to be said of a connection that failed, beyond gRPC's words."""
    if not details or "failed to connect" not in details:
        return ""
    return next((f" ({hint})" for words, hint in _HINTS if words in details), "")
