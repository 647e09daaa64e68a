"""A call's buffers go back to the pool when it ends, and those of a batch when that is dropped: at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import tqclient as tq
from tqclient.transport import BufferPool
from tqserver.local import LocalCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(arena="64MiB", mooncake="on") as running:
        yield running


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing goes by the garbage collector's grace: what is in a cycle stays."""
    # At the first jagged tensor torch imports modules, and leaves frames in cycles: here, not as a claim reads ahead.
    torch.nested.as_nested_tensor([torch.ones(1)], layout=torch.jagged)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("transport", ["shm", "grpc", "mooncake"])
def test_the_buffers_of_a_call_are_free_when_it_ends(
    cluster: LocalCluster, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool()
    monkeypatch.setattr("tqclient.client.BufferPool", lambda: pool)
    with tq.connect(cluster.address, transport=transport, timeout=10) as client:
        part = client.create_partition("part")
        samples = {"prompt": ["één", "", "三"], "extra": [{"any": ["thing", torch.ones(2)]}, (1, 2), None]}
        large = {"tokens": torch.zeros(3, 1 << 18), "mm": [{"pixels": torch.ones(n << 16, 4)} for n in (1, 2, 3)]}
        ids = part.put(samples | large)
        assert pool.stats().live_bytes == 0
        batch = part.get(ids)
        assert torch.equal(batch["tokens"], large["tokens"])
        assert pool.stats().live_bytes > 0  # of the tensors
        del batch
        assert pool.stats().live_bytes == 0
        with part.consumer("reader").claim(3) as claimed:
            assert claimed.rows == 3
            claimed.ack()
        del claimed
        assert pool.stats().live_bytes == 0
        with pytest.raises(tq.SchemaMismatch):
            part.put({"tokens": torch.zeros(3, 1 << 18, dtype=torch.int64)})
        with pytest.raises(tq.SampleNotFound):
            part.get(ids + 1000)
        assert pool.stats().live_bytes == 0
        client.delete_partition(part.name)
