"""Lengths of ragged fields: said by each put, kept by sample, and what claims by tokens make of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.model.driver import Driver, claim_request, ids, unpack
from tqclient.errors import ClaimTimeout, InvalidArgument, Sealed
from tqclient.limits import ROW_LENGTH_MAX
from tqclient.schema import Form, Kind
from tqclient.wire.packing import U8, U16, U32, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core, Readiness

RAGGED = Form("ragged", "torch", "int64", ()).to_bytes()
DENSE_OF_3 = Form("dense", "torch", "int64", (3,)).to_bytes()
STRUCT = Form("struct", children=(("pixels", Form("ragged", "torch", "float32", (4,))),)).to_bytes()


def _put(driver: Driver, session: int, p: int, lengths: list[int], **options: object) -> list[int]:
    return driver.put(
        session,
        p,
        len(lengths),
        ["tokens"],
        form=RAGGED,
        lengths={"tokens": lengths},
        **options,  # type: ignore[arg-type]
    )


def _claim(driver: Driver, session: int, p: int, tokens: int, batch: int = 0, **options: object) -> list[int]:
    options = {"token_field": "tokens", **options}
    return unpack(driver.claim(session, p, batch, max_tokens=tokens, **options).rows.ids)


def test_rows_are_taken_until_the_next_one_would_exceed_the_budget(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [3, 4, 2, 5, 1, 6])
    assert _claim(driver, session, p, 9) == [1, 2, 3]  # 3 + 4 + 2 = 9 exactly
    assert _claim(driver, session, p, 9) == [4, 5]  # 5 + 1 = 6, and 6 more would be 12
    with pytest.raises(ClaimTimeout):
        _claim(driver, session, p, 9)  # 6 is no full budget, and more may come
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    assert _claim(driver, session, p, 9) == [6]
    driver.core.check_invariants()


def test_batch_size_limits_a_claim_by_tokens(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1] * 5)
    assert _claim(driver, session, p, 100, batch=2) == [1, 2]
    assert driver.core.readiness(_as(driver, session, claim_request(p, 4, max_tokens=100, token_field="tokens"))) is (
        Readiness.WAIT
    )


def _as(driver: Driver, session: int, request: pb.ClaimRequest) -> pb.ClaimRequest:
    request.mutation.client_id, request.mutation.request, request.mutation.session = (1).to_bytes(16, "big"), 1, session
    return request


def test_a_budget_of_many_rows_is_found_in_several_looks(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [2] * 1000)
    assert _claim(driver, session, p, 1201) == list(range(1, 601))  # 600 rows of 2; the 601st would make 1,202
    assert _claim(driver, session, p, 600, sampler="lifo") == list(range(1000, 700, -1))


def test_a_row_that_exceeds_the_budget_alone_is_an_error_that_names_it(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [8, 1])
    with pytest.raises(InvalidArgument, match=r"sample 1 .* has 8 of 'tokens'"):
        _claim(driver, session, p, 7)
    assert driver.counts(p) == (0, 2, 0, 0, 0)


def test_dense_rows_and_children_of_structs_have_lengths(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [5])
    driver.put(session, p, 2, ["tokens"], form=DENSE_OF_3)  # rows of one tensor [2, 3] join the jagged column
    assert _claim(driver, session, p, 8) == [1, 2]
    q = driver.partition(session, "q")
    driver.put(session, q, 2, ["mm"], form=STRUCT, lengths={"mm.pixels": [2, 9]})
    driver.put(session, q, 2, ["fixed"], form=DENSE_OF_3, ids=[4, 5])
    assert _claim(driver, session, q, 10, token_field="mm.pixels") == [4]
    with pytest.raises(InvalidArgument, match=r"'mm' have no length; fields that have them: fixed, mm\.pixels"):
        _claim(driver, session, q, 10, token_field="mm")


def test_a_dense_child_that_joins_a_ragged_one_has_its_length(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1, ["mm"], form=STRUCT, lengths={"mm.pixels": [2]})
    dense = Form("struct", children=(("pixels", Form("dense", "torch", "float32", (3, 4))),)).to_bytes()
    driver.put(session, p, 2, ["mm"], form=dense)
    assert _claim(driver, session, p, 5, token_field="mm.pixels") == [1, 2]  # 2 + 3 = 5


def test_lengths_outlive_growth_compaction_and_a_restart(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [7] * 1500)
    _put(driver, session, p, list(range(1, 1001)))
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(*range(1, 1501))), session=session)
    data = driver.core.snapshot()
    driver.core = Core.restore(data, driver.now)
    assert driver.core.snapshot() == data
    assert _claim(driver, session, p, 15) == [1501, 1502, 1503, 1504, 1505]  # 1 + 2 + 3 + 4 + 5
    driver.core.check_invariants()


def test_an_upsert_replaces_lengths(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [4, 4], keys=["a", "b"])
    _put(driver, session, p, [1], keys=["a"], upsert=True)
    assert _claim(driver, session, p, 5) == [1, 2]


@pytest.mark.parametrize("width", [0, 1, 2, 4])
def test_lengths_of_any_width_are_the_same(driver: Driver, session: int, width: int) -> None:
    p = driver.partition(session)
    request = driver.commit(p, 3, ["tokens"], form=RAGGED)
    dtype = {1: U8, 2: U16}.get(width, U32)
    request.lengths.add(field="tokens", lengths=pack_array([4, 1, 2], dtype), width=width)
    driver.ok("commit", request, session=session)
    assert _claim(driver, session, p, 5) == [1, 2]


@pytest.mark.parametrize(("width", "data"), [(3, bytes(9)), (8, bytes(24)), (1, bytes(12)), (2, bytes(3))])
def test_lengths_of_no_such_width_are_refused(driver: Driver, session: int, width: int, data: bytes) -> None:
    request = driver.commit(driver.partition(session), 3, ["tokens"], form=RAGGED)
    request.lengths.add(field="tokens", lengths=data, width=width)
    with pytest.raises(InvalidArgument, match="lengths of 'tokens'"):
        driver.ok("commit", request, session=session)


def test_a_put_without_lengths_is_named_when_they_are_needed(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [4])
    driver.put(session, p, 1, ["tokens"], form=RAGGED)
    with pytest.raises(InvalidArgument, match=r"samples \[2\] were put without their lengths"):
        _claim(driver, session, p, 100)


@pytest.mark.parametrize(
    ("form", "lengths", "says"),
    [
        (RAGGED, {"a": [1, 2, 3]}, "lengths of 'a'"),
        (RAGGED, {"b": [1, 2]}, "no ragged field"),
        (DENSE_OF_3, {"a": [3, 3]}, "no ragged field"),
        (RAGGED, {"a": [1, (1 << 32) - 1]}, "at most"),
    ],
)
def test_lengths_must_fit_the_put(
    driver: Driver, session: int, form: bytes, lengths: dict[str, list[int]], says: str
) -> None:
    p = driver.partition(session)
    with pytest.raises(InvalidArgument, match=says):
        driver.put(session, p, 2, form=form, lengths=lengths)


def test_budget_and_field_come_together(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    with pytest.raises(InvalidArgument, match="both, or neither"):
        driver.claim(session, p, 1, max_tokens=5)


def test_a_drained_partition_ends_claims_by_tokens(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1])
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    driver.settle(session, driver.claim(session, p, 0, max_tokens=9, token_field="tokens").claim_id)
    with pytest.raises(Sealed):
        _claim(driver, session, p, 9)


def test_a_dense_row_that_is_longer_than_counts_has_no_length(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    too_long = Form("dense", "torch", "int64", (ROW_LENGTH_MAX + 1,)).to_bytes()
    driver.put(session, p, 1, ["weights"], form=too_long)
    fields = driver.describe(p).fields
    assert not fields[0].HasField("length_min")
    with pytest.raises(InvalidArgument, match="'weights' have no length"):
        _claim(driver, session, p, 10, token_field="weights")
    q = driver.partition(session, "q")
    ids = _put(driver, session, q, [5])
    ids += driver.put(session, q, 1, ["tokens"], form=too_long)
    with pytest.raises(InvalidArgument, match=rf"samples \[{ids[1]}\] were put without their lengths"):
        _claim(driver, session, q, 10)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("dense", (-1,)), *itertools.product(("dense", "ragged"), [(-2,), (2, -5), (1 << 63,), (True,)])],
)
def test_a_form_with_dimensions_that_no_tensor_has_is_refused(
    driver: Driver, session: int, kind: Kind, shape: Any
) -> None:
    p = driver.partition(session)
    with pytest.raises(InvalidArgument, match="not the form of a column"):
        driver.put(session, p, 1, form=Form(kind, "torch", "int64", shape).to_bytes())
    assert not driver.describe(p).fields
