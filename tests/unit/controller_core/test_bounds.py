"""What is too much of anything is refused by how much it is, before the controller looks at all of it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tests.model.driver import FORM, Driver, claim_request
from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument
from tqclient.schema import Form
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import common_pb2, journal_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import limits, validate

MANY_CHILDREN = Form("struct", children=tuple((f"key {i}", Form("list")) for i in range(80_000))).to_bytes()


def _commit(fields: int = 1, lengths: int = 0, form: bytes = FORM) -> pb.CommitRequest:
    request = Driver().commit(1, 1, [f"field {i}" for i in range(fields)], form=form)
    request.lengths.extend(pb.FieldLengths(field="field 0", lengths=b"not looked at") for _ in range(lengths))
    return request


def _claim(**options: Any) -> pb.ClaimRequest:
    return claim_request(1, 1, **options)


CASES: list[tuple[str, Any, str]] = [
    ("commit", _commit(fields=wire_limits.FIELDS_MAX + 1), "fields: 1025 of them, at most 1024"),
    ("commit", _commit(form=MANY_CHILDREN), r"fields: forms of \d+ bytes in all, at most 1048576"),
    ("commit", _commit(fields=2, form=MANY_CHILDREN[: 600 << 10]), r"fields: forms of \d+ bytes in all"),
    ("commit", _commit(lengths=2), "lengths of 'field 0': that is no ragged field of this put"),
    ("claim", _claim(fields=["f"] * (wire_limits.FIELDS_MAX + 1)), "field: 1025 names, at most 1024"),
    (
        "claim",
        _claim(sampler="prioritized", params={"tag": "x" * wire_limits.TAGS_BYTES_MAX}),
        "sampler.params: .* bytes",
    ),
    (
        "clear",
        pb.ClearRequest(partition_id=1, groups=common_pb2.Packed(ends=bytes(4 * wire_limits.ROWS_PER_PUT_MAX + 4))),
        "groups: more than 1048576 of them",
    ),
    (
        "clear",
        pb.ClearRequest(partition_id=1, tags=msgpack.packb({"t": "x" * wire_limits.TAGS_BYTES_MAX})),
        r"tags: \d+ bytes, at most 65536",
    ),
    (
        "set_metadata",
        pb.SetMetadataRequest(partition_id=1, delete=["k"] * (limits.DELETED_KEYS_MAX + 1)),
        "metadata: 65537 keys to delete, at most 65536",
    ),
]


@pytest.mark.parametrize(("kind", "body", "says"), CASES)
def test_too_much_of_it_is_refused(driver: Driver, kind: str, body: Any, says: str) -> None:
    body.mutation.client_id, body.mutation.request = bytes(16), 1
    with pytest.raises(InvalidArgument, match=says) as refused:
        driver.core.check(journal_pb2.Command(**{kind: body}))
    assert len(str(refused.value)) < 1_000


def test_no_more_pins_are_taken_again_than_may_be(driver: Driver) -> None:
    session = driver.open()
    with pytest.raises(InvalidArgument, match="held_pins: 1048577 blocks of them, at most 1048576"):
        driver.core.hold_pins(session, bytes(16 * limits.HELD_PAIRS_MAX + 16))
    driver.put(session, driver.partition(session), 1)
    block = next(iter(driver.core._state.blocks.live))
    driver.core.hold_pins(session, pack_array([[5, block]] * 3, U64))
    assert driver.core._state.leases.session(session).pins == {5: [block]}
    driver.core.check_invariants()


def test_no_more_pins_are_dropped_than_may_be() -> None:
    assert validate.dropped_pins(bytes(16)) == [0, 0]
    with pytest.raises(InvalidArgument, match="dropped_pins: 1048577 of them, at most 1048576"):
        validate.dropped_pins(bytes(8 * limits.DROPPED_PINS_MAX + 8))
