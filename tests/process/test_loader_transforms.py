"""What a loader makes of functions that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tqclient as tq
from tests.harness.supervisor import wait_until
from tqclient.torch import LoadedBatch, StreamingLoader
from tqserver.local import LocalCluster


def exhausted(_: LoadedBatch) -> Any:
    return next(iter(()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_transform_that_runs_dry_ends_no_epoch(cluster: LocalCluster, num_workers: int) -> None:
    client = tq.connect(cluster.address)
    part = client.create_partition("part")
    part.put({"x": torch.arange(4)})
    part.seal()
    loader = StreamingLoader(part.consumer("trainer"), 2, num_workers=num_workers, transform=exhausted)
    with pytest.raises(RuntimeError, match="transform raised StopIteration"):
        list(loader)
    assert (loader.epoch, loader.step) == (0, 0)
    wait_until(lambda: part.describe().counts["trainer"]["ready"] == 4, what="all are given back")
    client.close()


def sealed(_: Any) -> Any:
    raise tq.Sealed("of another partition")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_of_ranges_that_meets_a_sealed_partition_ends_no_epoch(
    cluster: LocalCluster, num_workers: int
) -> None:
    with tq.connect(cluster.address) as client:
        part = client.create_partition("part")
        part.put({"x": [torch.arange(3), torch.arange(2)]})
        part.seal()
        consumer = part.consumer("trainer")
        loader = StreamingLoader(consumer, 2, num_workers=num_workers, ranges={"x": sealed})
        with pytest.raises(RuntimeError, match="raised Sealed: of another partition"):
            list(loader)
        assert loader.epoch == 0
        wait_until(lambda: part.describe().counts["trainer"]["ready"] == 2, what="all are given back")
        with pytest.raises(RuntimeError, match="raised Sealed: of another partition"):
            list(consumer.batches(2, ranges={"x": sealed}))
