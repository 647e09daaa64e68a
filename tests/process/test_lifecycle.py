"""The life of a partition over real daemons: retirement, producers, the metadata of shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tqclient as tq
from tqserver.local import LocalCluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(cluster.address, timeout=10) as client:
        yield client


def test_a_partition_retires_and_keeps_its_description(client: tq.Client) -> None:
    part = client.create_partition("part", consumers=["x"])
    with part.producer():
        assert part.describe().producers == 1
        ids = part.put({"x": [torch.arange(2), torch.arange(5)]}, tags={"shard": 3})
    value = {"micro_batch_indices": [[[0, 4], [4, 9]], []], "num_microbatches": 2}
    part.shard(3).metadata.update(value)
    assert part.shard(3).metadata.to_dict() == value
    part.seal()
    with part.consumer("x").claim(2, timeout=5):
        pass
    info = part.describe()
    assert (info.retired, info.samples, info.bytes, info.producers) == (True, 2, 0, 0)
    assert (info.shards[3].metadata, info.shards[3].samples) == (value, 2)
    assert (info.fields["x"].kind, info.fields["x"].lengths) == ("ragged", (2, 5))
    with pytest.raises(tq.SampleNotFound, match="retired"):
        part.get(ids)
