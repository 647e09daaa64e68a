"""Row ranges and shared values against real daemons: what is stored, what is moved, what is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import tqclient as tq
from tqserver.local import LocalCluster

SAMPLES, TOKENS, CP = 64, 8192, 4
ITEM_BYTES = 47 * 4 * 2  # int16 [47, 4]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="384MiB") as running:
        yield running


@pytest.fixture(scope="module", params=["shm", "grpc"])
def client(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[tq.Client]:
    with tq.connect(cluster.address, transport=request.param, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="module")
def routed(cluster: LocalCluster) -> tuple[torch.Tensor, np.ndarray]:
    """The experts that 64 samples of 8,192 tokens were routed to, and the samples' ids."""
    values = torch.arange(SAMPLES * TOKENS, dtype=torch.int32)[:, None, None] * 188
    experts = (values + torch.arange(188, dtype=torch.int32).view(47, 4)).to(torch.int16)
    with tq.connect(cluster.address, timeout=60) as connected:
        part = connected.create_partition("routed")
        ids = part.put({"routed_experts": list(experts.view(SAMPLES, TOKENS, 47, 4)), "reward": torch.zeros(SAMPLES)})
    return experts.view(SAMPLES, TOKENS, 47, 4), ids


def read_bytes(client: tq.Client) -> int:
    return sum(traffic.read_bytes for traffic in client.counters.values())


def test_a_cp_rank_moves_only_its_slice(client: tq.Client, routed: tuple[torch.Tensor, np.ndarray]) -> None:
    experts, ids = routed
    part = client.partition("routed")
    part.get(ids[:1], fields=["reward"])
    for rank in range(CP):
        start, stop = rank * TOKENS // CP, (rank + 1) * TOKENS // CP
        before = read_bytes(client)
        batch = part.get(ids, fields=["routed_experts"], ranges={"routed_experts": (start, stop)})
        moved = read_bytes(client) - before
        assert torch.equal(batch["routed_experts"].values().view(SAMPLES, -1, 47, 4), experts[:, start:stop])
        wanted = SAMPLES * (stop - start) * ITEM_BYTES
        assert wanted <= moved <= 1.1 * wanted
        batch.close()


def test_a_cp_rank_of_samples_of_all_lengths(client: tq.Client) -> None:
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(512), np.log(TOKENS), SAMPLES)).astype(np.int64)
    experts = [torch.randint(0, 128, (length, 47, 4), dtype=torch.int16) for length in lengths.tolist()]
    part = client.create_partition("lengths")
    try:
        ids = part.put({"routed_experts": experts})
        before = read_bytes(client)
        batch = part.get(ids, ranges={"routed_experts": lambda known: np.stack([known // CP, known // 2], axis=1)})
        for row, whole, length in zip(batch.list("routed_experts"), experts, lengths.tolist(), strict=True):
            assert torch.equal(row, whole[length // CP : length // 2])
        assert read_bytes(client) - before <= 1.1 * int((lengths // 2 - lengths // CP).sum()) * ITEM_BYTES
    finally:
        client.delete_partition("lengths")


def test_a_claim_by_ranges_that_follow_the_lengths(client: tq.Client) -> None:
    part = client.create_partition("claims")
    try:
        rows = [torch.arange(length * 3).view(length, 3) for length in (8, 2, 5)]
        ids = part.put({"x": rows, "name": ["a", "b", "c"]})
        consumer = part.consumer("trainer", fields=["name", "x"])
        halves = {"x": lambda lengths: np.stack([lengths // 2, lengths], axis=1)}
        with consumer.claim(2, ranges=halves, timeout=10) as batch:
            assert [row.tolist() for row in batch.list("x")] == [rows[0][4:].tolist(), rows[1][1:].tolist()]
            assert batch["name"] == ["a", "b"]
        with pytest.raises(tq.InvalidArgument, match=f"row 0, sample {ids[2]}, whose length is 5") as caught:
            consumer.claim(1, ranges={"x": (4, 6)}, timeout=10)
        assert caught.value.ids == (ids[2],)
        with consumer.claim(1, ranges={"x": (4, 5)}, timeout=10) as batch:  # it was given back
            assert batch.list("x")[0].tolist() == [[12, 13, 14]]
            assert batch.attempts.tolist() == [2]
    finally:
        client.delete_partition(part.name)


def test_views_of_ranges(client: tq.Client) -> None:
    part = client.create_partition("views")
    try:
        values = torch.arange(600_000).view(2, 100_000, 3)
        ids = part.put({"x": list(values)})
        with part.get(ids[1:], ranges={"x": (10, 90_000)}, copy=False) as batch:
            assert torch.equal(batch["x"][0], values[1, 10:90_000])
    finally:
        client.delete_partition("views")


def test_the_asyncio_client_reads_ranges(cluster: LocalCluster) -> None:
    async def main() -> None:
        async with tq.aio.connect(cluster.address, timeout=20) as client:
            part = await client.create_partition("aio")
            ids = await part.put({"x": [torch.arange(5), torch.arange(3)]})
            batch = await part.get(ids, ranges={"x": [(1, 3), (0, None)]})
            assert [row.tolist() for row in batch["x"].unbind()] == [[1, 2], [0, 1, 2]]
            async with part.consumer("c").claim(2, ranges={"x": (1, 2)}, timeout=10) as claimed:
                assert [row.tolist() for row in claimed["x"].unbind()] == [[1], [1]]
            part_bytes = [traffic.read_bytes for traffic in client.counters.values()]
            assert part_bytes == [64 + 64]  # two reads of the five numbers and the three behind them
            await client.delete_partition("aio")

    asyncio.run(main())


def test_shared_values_are_stored_and_fetched_once(client: tq.Client) -> None:
    copies, images = 16, [torch.randint(0, 255, (40_000 + 1000 * image, 3), dtype=torch.uint8) for image in range(8)]
    index = np.repeat(np.arange(8), copies)
    shared, plain = client.create_partition("shared"), client.create_partition("plain")
    try:
        ids = shared.put({"image": tq.Shared(images, index), "mm": {"pixels": tq.Shared(images, index)}})
        repeated = [images[image] for image in index]
        other = plain.put({"image": repeated, "mm": {"pixels": repeated}})
        assert shared.describe().bytes <= plain.describe().bytes / 12
        assert shared.describe().fields["image"].form == plain.describe().fields["image"].form

        before = read_bytes(client)
        batch = shared.get(ids)
        once = read_bytes(client) - before
        expected = plain.get(other)
        assert once <= (read_bytes(client) - before - once) / 12
        for mine, theirs in ((batch["image"], expected["image"]), (batch["mm"]["pixels"], expected["mm"]["pixels"])):
            assert mine.is_nested
            assert torch.equal(mine.values(), theirs.values())
            assert torch.equal(mine.offsets(), theirs.offsets())
        listed = batch.list("image")
        assert listed[0].data_ptr() == listed[15].data_ptr() != listed[16].data_ptr()

        one_each = shared.get(ids[::copies], ranges={"image": (10, 20)})
        assert torch.equal(one_each["image"].values(), torch.cat([image[10:20] for image in images]))
        with shared.consumer("trainer", fields=["mm"]).claim(20, timeout=10) as claimed:
            assert torch.equal(claimed["mm"]["pixels"][17], images[1])
    finally:
        client.delete_partition("shared")
        client.delete_partition("plain")


def test_putting_shared_values_again_has_no_effect(client: tq.Client) -> None:
    part = client.create_partition("again")
    try:
        first = part.put({"x": tq.Shared([torch.arange(3), torch.arange(5)], [1, 0, 1])}, keys=["a", "b", "c"])
        plain = {"x": [torch.arange(5), torch.arange(3), torch.arange(5)]}
        assert part.put(plain, keys=["a", "b", "c"]).tolist() == first.tolist()
        other = tq.Shared([torch.arange(3), torch.arange(1, 6)], [1, 0, 1])
        with pytest.raises(tq.DuplicateKey):
            part.put({"x": other}, keys=["a", "b", "c"])
        assert [len(row) for row in part.get(keys=["c", "b"])["x"].unbind()] == [5, 3]
        more = part.put({"x": [torch.arange(2)]})
        mixed = part.get([*first, *more])
        assert [len(row) for row in mixed["x"].unbind()] == [5, 3, 5, 2]
    finally:
        client.delete_partition("again")


def test_a_range_of_a_child_is_not_of_a_field_that_has_its_path_for_a_name(client: tq.Client) -> None:
    part = client.create_partition(f"dotted-{client.describe().sessions}")
    values = {"s": [{"a": torch.arange(10)}, {"a": torch.arange(9)}], "s.a": [torch.arange(3), torch.arange(2)]}
    ids = part.put(values)
    child = part.get(ids, fields=["s"], ranges={"s.a": (4, 6)})["s"]["a"]
    assert [row.tolist() for row in child.unbind()] == [[4, 5], [4, 5]]
    both = part.get(ids, ranges={"s.a": (1, 2)})
    assert [row.tolist() for row in both["s.a"].unbind()] == [[1], [1]]
    assert [len(row["a"]) for row in both.list("s")] == [10, 9]
    client.delete_partition(part.name)
