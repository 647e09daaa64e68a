"""The loader on a machine with a CUDA device; `make cuda` runs it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tqclient as tq
from tqclient.torch import StreamingLoader
from tqserver.local import LocalCluster

pytestmark = pytest.mark.cuda

ROWS, BATCH = 64, 8
PIXELS = 1 << 16


@pytest.fixture(scope="module")
def client() -> Iterator[tq.Client]:
    with LocalCluster(arena="256MiB") as cluster, tq.connect(cluster.address, timeout=10) as connected:
        yield connected


@pytest.fixture
def part(client: tq.Client) -> Iterator[tq.Partition]:
    partition = client.create_partition("loader")
    partition.put(
        {
            "number": torch.arange(ROWS),
            "tokens": [torch.full((row % 5 + 1,), row) for row in range(ROWS)],
            "mm": [{"pixels": torch.full((PIXELS,), float(row))} for row in range(ROWS)],
            "text": [f"row {row}" for row in range(ROWS)],
        }
    )
    partition.seal()
    yield partition
    client.delete_partition(partition.name)


def check(batch: Any, first: int, device: str) -> None:
    numbers = list(range(first, first + BATCH))
    assert {batch["number"].device.type, batch["tokens"].device.type, batch["mm"]["pixels"].device.type} == {device}
    assert batch["number"].tolist() == numbers
    assert [row.tolist() for row in batch["tokens"].unbind()] == [[row] * (row % 5 + 1) for row in numbers]
    assert batch["text"] == [f"row {row}" for row in numbers]
    # Each value 65,536 times: a copy that the step did not wait for would show.
    assert batch["mm"]["pixels"].double().mean(dim=1).tolist() == [float(row) for row in numbers]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_are_on_the_device_when_they_are_handed_out(part: tq.Partition, prefetch: int) -> None:
    busy = torch.ones(2048, 2048, device="cuda")
    with StreamingLoader(part.consumer("trainer"), BATCH, prefetch=prefetch, device="cuda") as loader:
        for turn, batch in enumerate(loader):
            busy = busy @ busy / 2048  # a step that is under way on the default stream while the next batch is copied
            check(batch, turn * BATCH, "cuda")
    assert part.describe().counts["trainer"]["consumed"] == ROWS
    assert float(busy[0, 0]) == 1.0


def test_pinned_memory_without_a_device(part: tq.Partition) -> None:
    with StreamingLoader(part.consumer("pinned"), BATCH, pin_memory=True) as loader:
        for turn, batch in enumerate(loader):
            check(batch, turn * BATCH, "cpu")
            assert batch["number"].is_pinned()
            assert batch["tokens"].values().is_pinned()
            assert batch["mm"]["pixels"].is_pinned()


def test_the_memory_of_a_batch_is_not_used_again_under_a_step_that_reads_it(part: tq.Partition) -> None:
    sums = []
    with StreamingLoader(part.consumer("reuse"), BATCH, prefetch=3, device="cuda") as loader:
        for batch in loader:
            pixels = batch["mm"]["pixels"]
            del batch
            torch.cuda._sleep(20_000_000)  # the step begins late: by then the next batches are on their way
            sums.append(pixels.double().sum())
            del pixels
    assert [float(each) for each in sums] == [
        float(PIXELS * sum(range(first, first + BATCH))) for first in range(0, ROWS, BATCH)
    ]
