"""All that users put goes from one host to another, by the transport that was required, and arrives bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import tqclient as tq
from benchmarks import workloads
from tests.harness.remote import Remote
from tests.hosts.cluster import CLIENTS, STORAGE, HostCluster
from tests.unit.codec.strategies import batches
from tests.unit.codec.values import identical, rows_of
from tqclient.limits import MIB

ARENA_BYTES = 256 * MIB
LEASE_SECONDS = 10.0
"""No fault is tested here; to compare values takes long, and other threads of the process wait meanwhile."""
EXAMPLES = 60
ROWS = {"multimodal": 12, "small": 8192, "regular": 128, "jagged": 128}
"""Of each workload of the benchmarks: enough for several transfers of each put."""

Batch = dict[str, Any]


class Pair(NamedTuple):
    """Two clients, on hosts of their own."""

    transport: str
    producer: Remote
    consumer: Remote


@pytest.fixture(scope="module", params=["mooncake"])
def pair(cluster: HostCluster, request: pytest.FixtureRequest) -> Iterator[Pair]:
    users = [cluster.user(host, transport=request.param) for host in CLIENTS]
    yield Pair(request.param, *(user.wait_made() for user in users))
    for user in users:
        user.close()


def drawn(seed: int, count: int) -> list[Batch]:
    """The same batches in each process: values reach the other host through the service, or not at all."""
    found: list[Batch] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(batches)
    def draw(batch: Batch) -> None:
        # Columns have other names: those that a field may not have are refused, and tested elsewhere.
        found.append({f"field-{index}": column for index, column in enumerate(batch.values())})

    draw()
    return [batch for batch in found if len(rows_of(batch["field-0"]))]


def built(name: str, seed: int) -> Batch:
    """A workload of the benchmarks, at the reduced size."""
    return {field: column[: ROWS[name]] for field, column in workloads.build(name, seed).items()}


def put_drawn(client: tq.Client, seed: int, prefix: str) -> list[list[int]]:
    """Puts each batch to a partition of its own; returns their ids."""
    found = []
    for index, batch in enumerate(drawn(seed, EXAMPLES)):
        found.append(client.create_partition(f"{prefix}/{index}").put(batch).tolist())
    return found


def check_drawn(client: tq.Client, seed: int, prefix: str, ids: list[list[int]]) -> int:
    """Gets each batch, looks at every bit, and clears it; returns how many batches there were."""
    drawn_here = drawn(seed, EXAMPLES)
    assert len(drawn_here) == len(ids), "the two processes drew other batches"
    for index, (batch, rows) in enumerate(zip(drawn_here, ids, strict=True)):
        part = client.partition(f"{prefix}/{index}")
        for copy in (True, False):
            check(part.get(rows, copy=copy), batch)
        with part.consumer("trainer").claim(len(rows), timeout=10) as claimed:
            check(claimed, batch)
        client.delete_partition(part.name)
    return len(ids)


def check(found: Any, batch: Batch) -> None:
    assert found.fields == list(batch)
    for name, column in batch.items():
        assert identical(rows_of(column), found.list(name)), f"{name!r}: {column!r} came back as {found[name]!r}"


def put_built(client: tq.Client, name: str, seed: int) -> list[int]:
    ids: list[int] = client.create_partition(name).put(built(name, seed)).tolist()
    return ids


def check_built(client: tq.Client, name: str, seed: int, ids: list[int]) -> None:
    """Gets everything, and then rows here and there; looks at every bit."""
    part, batch = client.partition(name), built(name, seed)
    check(part.get(ids), batch)
    picked = np.random.default_rng(seed).permutation(len(ids))[: len(ids) // 8].tolist()
    some = part.get([ids[row] for row in picked])
    for field, column in batch.items():
        rows = rows_of(column)
        assert identical([rows[row] for row in picked], some.list(field)), field
    client.delete_partition(name)


def paths(client: tq.Client) -> dict[str, tuple[str, str]]:
    """Transport and reason, by node."""
    return {node.name: (node.transport, node.reason) for node in client.describe().nodes}


def check_paths(cluster: HostCluster, pair: Pair) -> None:
    """Nothing went another way, and nothing was registered on the way."""
    for user in (pair.producer, pair.consumer):
        found = user.call(paths)
        assert found.keys() == set(STORAGE)
        for transport, reason in found.values():
            assert transport == pair.transport
            assert "registrations here 1, there 1" in reason
    for name in STORAGE:
        node = cluster.describe(name).mooncake
        assert (node.protocol, node.registrations) == ("tcp", 1)
        assert node.registered_bytes == ARENA_BYTES


def test_every_kind_of_value_arrives_on_another_host(cluster: HostCluster, pair: Pair, seed: int) -> None:
    ids = pair.producer.call(put_drawn, seed, "drawn")
    assert pair.consumer.call(check_drawn, seed, "drawn", ids) > EXAMPLES // 3
    check_paths(cluster, pair)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_workloads_arrive_on_another_host(cluster: HostCluster, pair: Pair, name: str, seed: int) -> None:
    ids = pair.producer.call(put_built, name, seed)
    assert len(ids) == ROWS[name]
    pair.consumer.call(check_built, name, seed, ids)
    check_paths(cluster, pair)


def paths_of_another(_client: tq.Client, address: str, transport: str) -> dict[str, tuple[str, str]]:
    with tq.connect(address, transport=transport, timeout=10) as client:
        return paths(client)


def test_the_arena_of_another_host_cannot_be_mapped(cluster: HostCluster, pair: Pair) -> None:
    address = cluster.controller.address
    with pytest.raises(tq.TransportUnavailable, match="shm"):
        pair.producer.call(paths_of_another, address, "shm")
    for transport, reason in pair.producer.call(paths_of_another, address, "auto").values():
        assert transport == "mooncake"
        assert "no shm: " in reason
