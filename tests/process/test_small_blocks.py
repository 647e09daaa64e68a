"""Groups that are put as they end, over real daemons: whoever takes which rows gets what was put in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tqclient as tq
from tqserver.local import LocalCluster

GROUPS, SIZE = 24, 4
FIELDS = ("tokens", "reward", "uid", "extra", "image")


def row_of(number: int) -> dict[str, Any]:
    return {
        "tokens": torch.arange(number * 37 % 900, dtype=torch.int64) + number,
        "reward": torch.tensor([number / 8]),
        "uid": f"row {number}" * (number % 3),
        "extra": {"turns": number, "scores": np.arange(number % 4)},
        "image": torch.full((1 + number // SIZE % 7, 3), number // SIZE),  # of all of the group
    }


def group_of(group: int) -> dict[str, Any]:
    rows = [row_of(SIZE * group + member) for member in range(SIZE)]
    image = tq.Shared([rows[0]["image"]], [0] * SIZE)
    plain = {name: [row[name] for row in rows] for name in FIELDS}
    return plain | {"reward": torch.stack([row["reward"] for row in rows]), "image": image}


def assert_brings(batch: tq.Batch, numbers: list[int]) -> None:
    assert len(batch.ids) == len(numbers)
    for place, number in enumerate(numbers):
        expected = row_of(number)
        for name in batch.fields:
            got = batch.list(name)[place]
            if name == "extra":
                assert got["turns"] == number
                assert np.array_equal(got["scores"], expected["extra"]["scores"])
            elif name == "uid":
                assert got == expected["uid"]
            else:
                assert torch.equal(got, expected[name])


@pytest.fixture(params=["shm", "grpc"])
def part(request: pytest.FixtureRequest, cluster: LocalCluster) -> Iterator[tq.Partition]:
    with tq.connect(cluster.address, timeout=20, transport=request.param) as client:
        part = client.create_partition(f"small/{request.param}")
        for group in range(GROUPS):
            part.put(group_of(group), groups=[f"group {group}"] * SIZE, tags=[{"part": request.param}] * SIZE)
        yield part


def test_rows_of_groups_come_as_they_were_put(part: tq.Partition) -> None:
    """First reads, of which none knows a directory, and later ones."""
    rng = np.random.default_rng(3)
    with part.consumer("all", sampler=tq.GroupSampler(SIZE)).claim(GROUPS * SIZE) as batch:
        first = int(batch.ids.min())
        assert_brings(batch, list(range(GROUPS * SIZE)))
    for name, sampler in (("random", tq.Random(1)), ("lifo", tq.Lifo()), ("again", tq.Random(2))):
        consumer = part.consumer(name, sampler=sampler, fields=FIELDS if name != "again" else ["uid", "tokens"])
        for copy in (True, False):
            with consumer.claim(GROUPS * SIZE // 2, copy=copy) as batch:
                assert_brings(batch, [int(sample) - first for sample in batch.ids])
    for size in (1, 7, 60):
        numbers = rng.permutation(GROUPS * SIZE)[:size]
        assert_brings(part.get(numbers + first, fields=["extra", "image", "tokens"]), numbers.tolist())
    numbers = rng.permutation(GROUPS * SIZE)[:20].tolist()
    ends = [min(5, len(row_of(number)["tokens"])) for number in numbers]
    clipped = part.get(np.add(numbers, first), fields=["tokens"], ranges={"tokens": [(0, end) for end in ends]})
    for number, got in zip(numbers, clipped.list("tokens"), strict=True):
        assert torch.equal(got, row_of(number)["tokens"][:5])
