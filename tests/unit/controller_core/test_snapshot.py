"""The state put into bytes: of one moment, in short pieces, and read whatever release wrote it."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from tests.model.driver import Driver, ids
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core, snapshot

ROWS = 3 * snapshot.SLICE + 7


@pytest.fixture
def filled(driver: Driver, session: int) -> tuple[Driver, int, int]:
    """Blocks of one row, with keys, tags and groups, of which some are claimed and some are cleared."""
    p = driver.partition(session)
    keys = [f"key {row}" for row in range(ROWS)]
    tags = [{"status": row % 3} for row in range(ROWS)]
    groups = [row // 8 for row in range(ROWS)]
    request = driver.commit(p, ROWS, ("a", "b"), keys=keys, tags=tags, groups=groups, blocks=[1] * ROWS)
    driver.ok("commit", request, session=session)
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(5, 30)), session=session)
    driver.ok("claim", pb.ClaimRequest(partition_id=p, consumer="x", fields=["a"], batch_size=600), session=session)
    return driver, session, p


def test_it_is_of_one_moment_whatever_happens_while_it_is_put_into_bytes(filled: tuple[Driver, int, int]) -> None:
    driver, session, p = filled
    expected = driver.core.snapshot()
    chunks = driver.core.capture().chunks()
    written = [next(chunks)]
    for turn, chunk in enumerate(chunks):
        written.append(chunk)
        if turn % 8 == 0:
            request = driver.commit(p, 9, ("a", "b"), keys=[f"{turn} {row}" for row in range(9)])
            driver.ok("commit", request, session=session)
            driver.ok("claim", pb.ClaimRequest(partition_id=p, consumer="x", batch_size=5), session=session)
            driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(turn + 40, turn + 300)), session=session)
            driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=turn + 1), session=session)
    assert b"".join(written) == expected
    assert driver.core.snapshot() != expected


def test_its_pieces_are_short_and_make_one_message(filled: tuple[Driver, int, int]) -> None:
    chunks = list(filled[0].core.capture().chunks())
    data = b"".join(chunks)
    assert len(data) / len(chunks) < 2 * snapshot.PIECE_BYTES
    assert len(chunks) > 8
    assert msgpack.packb(msgpack.unpackb(data, strict_map_key=False)) == data


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, 1_000_000])
def test_what_goes_before_bytes_is_what_msgpack_has_there(size: int) -> None:
    assert snapshot._bin_header(size) + bytes(size) == msgpack.packb(bytes(size))


def test_who_refers_to_a_block_is_told_by_rows_and_claims(filled: tuple[Driver, int, int]) -> None:
    driver, _, _ = filled
    restored = Core.restore(driver.core.snapshot(), driver.now)
    restored.check_invariants()
    for kept, found in zip(driver.core._state.blocks.live.values(), restored._state.blocks.live.values(), strict=True):
        assert (kept.references, kept.claims) == (found.references, found.claims)
    assert {(each.references, each.claims) for each in restored._state.blocks.live.values()} == {(2, 1), (2, 0)}


def test_one_of_the_first_format_is_read(filled: tuple[Driver, int, int]) -> None:
    driver, _, _ = filled
    data = driver.core.snapshot()
    tree = msgpack.unpackb(data, strict_map_key=False)
    numbers = np.frombuffer(tree["blocks"]["numbers"], "<u8").reshape(-1, 4)
    counted = [(block.references, block.claims) for block in driver.core._state.blocks.live.values()]
    tree["blocks"]["numbers"] = np.insert(numbers, [3, 3], np.array(counted, "<u8"), axis=1).tobytes()
    tree["format"] = 1
    restored = Core.restore(msgpack.packb(tree), driver.now)
    restored.check_invariants()
    assert restored.snapshot() == data
