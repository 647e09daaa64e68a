"""Errors across the wire: every class, every code, every gRPC status."""

from __future__ import annotations

import grpc
import pytest

from tqclient import errors, limits
from tqclient.wire import status
from tqclient.wire.v1 import common_pb2 as pb

CLASSES = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.TQError)}
# The root is never raised; the transports' own refusal never crosses the wire.
LOCAL = {errors.TQError, errors.UnsupportedValue, errors.TransportUnavailable}
CODES = [code for code in pb.ErrorCode.values() if code != pb.ERROR_CODE_UNSPECIFIED]


class RpcError(grpc.RpcError):
    """What a stub raises, with only what the client reads."""

    def __init__(self, code: grpc.StatusCode, details: str = "", trailing: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._answer = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._answer[2]


def test_the_table_has_every_class_and_every_code_once() -> None:
    classes = [row[0] for row in status.TABLE]
    assert sorted(map(str, classes)) == sorted(map(str, CLASSES - LOCAL))
    assert sorted(row[1] for row in status.TABLE) == sorted(CODES)


@pytest.mark.parametrize("cls", sorted(CLASSES - LOCAL, key=str), ids=lambda cls: cls.__name__)
def test_each_class_crosses_the_wire(cls: type[errors.TQError]) -> None:
    sent = cls("field 'tokens', row 3: gone", ids=[7, -1], rows=[3], existing_ids=[2**40])
    detail = pb.ErrorDetail.FromString(status.to_detail(sent).SerializeToString())
    trailing = (("other", b"x"), (status.DETAIL_KEY, detail.SerializeToString()))
    received = status.from_rpc_error(
        RpcError(status.status_of(sent), "text is for people", trailing), peer="controller"
    )
    assert type(received) is cls
    assert str(received) == "field 'tokens', row 3: gone"
    assert (received.ids, received.rows, received.existing_ids) == ((7, -1), (3,), (2**40,))


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_each_status_without_a_detail_is_an_error_of_ours(code: grpc.StatusCode) -> None:
    expected = {
        grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
        grpc.StatusCode.CANCELLED: errors.Unavailable,
        grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: errors.Unauthenticated,
        grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedVersion,
        grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    }
    received = status.from_rpc_error(RpcError(code, "why"), peer="controller 127.0.0.1:7700")
    assert type(received) is expected.get(code, errors.InternalError)
    assert str(received) == f"controller 127.0.0.1:7700: {code.name}: why"


def test_only_a_call_that_may_succeed_unchanged_is_retryable() -> None:
    retryable = {cls for cls in CLASSES if cls.retryable}
    assert retryable == {errors.BackpressureTimeout, errors.ClaimTimeout, errors.StorageFull, errors.Unavailable}


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.InvalidArgument, ValueError),
        (errors.UnsupportedValue, TypeError),
        (errors.PartitionNotFound, KeyError),
        (errors.SampleNotFound, KeyError),
        (errors.BackpressureTimeout, TimeoutError),
        (errors.ClaimTimeout, TimeoutError),
        (errors.Unavailable, ConnectionError),
    ],
)
def test_a_class_is_the_builtin_that_a_caller_expects(cls: type[errors.TQError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)


def test_a_subclass_travels_as_its_nearest_base() -> None:
    class TokenExpired(errors.Unauthenticated):
        pass

    assert type(status.from_detail(status.to_detail(TokenExpired("no")))) is errors.Unauthenticated
    assert status.status_of(TokenExpired("no")) is grpc.StatusCode.UNAUTHENTICATED
    assert status.to_detail(errors.TQError("bare")).code == pb.ERROR_CODE_INTERNAL


def test_a_code_of_a_later_version_is_an_internal_error_with_its_message() -> None:
    received = status.from_detail(pb.ErrorDetail(code=9999, message="from the future"))  # type: ignore[arg-type]
    assert (type(received), str(received)) == (errors.InternalError, "from the future")


@pytest.mark.parametrize("value", [b"\xff\xff", pb.ErrorDetail(ids=b"123").SerializeToString()])
def test_a_detail_that_cannot_be_read_falls_back_to_the_status(value: bytes) -> None:
    error = RpcError(grpc.StatusCode.UNAVAILABLE, "down", ((status.DETAIL_KEY, value),))
    assert type(status.from_rpc_error(error, peer="node")) is errors.Unavailable


def test_ids_and_rows_are_cut_at_the_limit() -> None:
    many = range(limits.ERROR_IDS_MAX + 1)
    received = status.from_detail(status.to_detail(errors.SampleNotFound("many", ids=many, rows=many)))
    assert len(received.ids) == len(received.rows) == limits.ERROR_IDS_MAX
