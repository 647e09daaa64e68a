"""Which blocks are read together, and what is left of a call that one of them failed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.client.fakes import FakeService
from tqclient.arguments import RowArguments
from tqclient.errors import CorruptBlock, InvalidArgument, SampleNotFound, TQError
from tqclient.limits import MIB
from tqclient.operations.bring import ALONE_BYTES_MIN, TOGETHER_BYTES_MAX, TOGETHER_RANGES_MAX, batches
from tqclient.operations.cluster import start
from tqclient.operations.put import put
from tqclient.operations.read import get
from tqclient.operations.replicas import Path
from tqclient.wire.v1 import common_pb2

ROWS = 6


def path(transport: Any, *, spare: bool = False) -> Path:
    return Path(transport, common_pb2.Extent(length=64 * MIB), "n", spare)


def sizes_of(*sizes: int) -> dict[int, np.ndarray]:
    return {index: np.array([(0, size)], np.uint64) for index, size in enumerate(sizes)}


def cut(wanted: dict[int, np.ndarray], paths: dict[int, Path]) -> list[list[int]]:
    return [list(batch.reads) for batch in batches(wanted, paths)]


def test_small_blocks_of_one_path_are_read_together_up_to_a_limit() -> None:
    near, far = path("a"), path("b")
    assert cut({}, {}) == []
    assert cut(sizes_of(1, 1, 1, 1), {0: near, 1: far, 2: near, 3: far}) == [[0, 2], [1, 3]]
    assert cut(sizes_of(1, 1, 1), {0: far, 1: path("b", spare=True), 2: far}) == [[0, 2], [1]]
    assert cut(sizes_of(1, ALONE_BYTES_MIN, 1), dict.fromkeys(range(3), near)) == [[1], [0, 2]]
    almost = ALONE_BYTES_MIN - 1
    fitting = TOGETHER_BYTES_MAX // almost
    together = cut(sizes_of(*[almost] * (fitting + 2)), dict.fromkeys(range(fitting + 2), near))
    assert together == [list(range(fitting)), [fitting, fitting + 1]]
    many = {index: np.ones((TOGETHER_RANGES_MAX // 2, 2), np.uint64) for index in range(3)}
    assert cut(many, dict.fromkeys(range(3), near)) == [[0, 1], [2]]
    (batch,) = batches(sizes_of(3, 4), {0: near, 1: near})
    assert (batch.path, batch.size_bytes, batch.ranges) == (near, 7, 2)


def with_rows(*paths: str, replicas: int) -> tuple[FakeService, list[int]]:
    """Each row is a block of its own."""
    service = FakeService(*paths, replicas=replicas)
    service.run(start(service.state, False))
    ids: list[int] = []
    for row in range(ROWS):
        values = {"x": torch.full((1, 2), row)}
        ids += service.run(put(service.state, service.ref(), values, RowArguments(), 5.0)).tolist()
    return service, ids


def read(service: FakeService, ids: list[int]) -> list[int]:
    delivery = service.run(get(service.state, service.ref(), ids, None, None, True, 5.0))
    found: list[int] = delivery.columns["x"].value[:, 0].tolist()
    return found


def test_one_row_puts_are_brought_by_one_call_of_a_node() -> None:
    service, ids = with_rows("grpc", replicas=1)
    assert read(service, ids) == list(range(ROWS))
    assert service.first.transport.together == [ROWS]
    assert service.state.counters.traffic()["grpc"].reads == ROWS


@pytest.mark.parametrize("error", [SampleNotFound("gone"), InvalidArgument("out of the arena")])
def test_another_replica_serves_the_one_of_many_that_a_node_lacks(error: TQError) -> None:
    service, ids = with_rows("grpc", "grpc", replicas=2)
    service.fault("read", error)  # of all of them, ...
    service.fault("read", error)  # ... and of the first one, when it is read by itself
    assert read(service, ids) == list(range(ROWS))
    first, *_ = (node.transport for node in service.nodes if node.transport.alone)
    assert first.alone == (first.together[0] if isinstance(error, SampleNotFound) else 1)
    assert first.together[0] >= 2
    assert sum(first.together[1:]) == first.together[0] - 1  # what it has is read of it again


def test_a_node_that_is_away_is_given_up_for_all_blocks_at_once() -> None:
    service, ids = with_rows("grpc", "grpc", replicas=2)
    service.nodes[0].condition = "away"
    assert read(service, ids) == list(range(ROWS))
    (asked,) = service.nodes[0].transport.together
    assert asked >= 2
    assert sum(service.nodes[1].transport.together[-2:]) == ROWS


def test_a_node_without_its_arena_is_given_up_for_all_blocks_at_once() -> None:
    service, ids = with_rows("grpc", "grpc", replicas=2)
    lost = service.nodes[0].transport

    def gone(*_: Any, **__: Any) -> Any:
        lost.alone += 1
        raise SampleNotFound("no extent of that generation")

    lost.read = gone  # type: ignore[method-assign]
    lost.bring = gone  # type: ignore[method-assign]
    assert read(service, ids) == list(range(ROWS))
    (asked,) = lost.together
    assert asked >= 2
    assert lost.alone == 1 + asked
    assert sum(service.nodes[1].transport.together[-2:]) == ROWS


def test_what_no_node_has_is_named() -> None:
    service, ids = with_rows("grpc", replicas=1)
    third = sorted(service.blocks)[2]
    bring = service.first.transport.bring

    def lacking(extent: common_pb2.Extent, ranges: Any, timeout: float | None) -> Any:
        if extent.offset == service.blocks[third].extents[0].offset:
            raise InvalidArgument("a range of 5 bytes at 9")
        return bring(extent, ranges, timeout)

    service.first.transport.bring = lacking  # type: ignore[method-assign]
    with pytest.raises(CorruptBlock, match=rf"partition 'part', field 'x', row 2, sample {ids[2]}: a range") as caught:
        read(service, ids)
    assert caught.value.ids == (ids[2],)
    service.first.transport.bring = bring  # type: ignore[method-assign]
    assert read(service, ids) == list(range(ROWS))
