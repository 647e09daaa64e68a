"""Views under a claim: what they show, and what `verify` finds in them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tqclient as tq
from tests.faults.probe import node_probe
from tests.harness import wait_until
from tqclient.limits import MIB
from tqserver.local import LocalCluster

ROWS, LENGTH = 8, 5000


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="16MiB") as cluster:
        yield cluster


@pytest.mark.parametrize("cleared", ["before", "after the grace"])
def test_views_outlast_a_restart_of_the_controller(cleared: str) -> None:
    lease = 1.0 if cleared == "after the grace" else 5.0
    with (
        LocalCluster(storage_nodes=1, arena="8MiB", session_lease=lease, prefault=False) as cluster,
        tq.connect(cluster.address, timeout=20) as reader,
        tq.connect(cluster.address, timeout=20) as writer,
    ):
        part = writer.create_partition("part")
        ids = part.put({"x": torch.full((1, MIB), 7, dtype=torch.uint8)})
        batch = reader.partition("part").get(ids, copy=False)
        with node_probe(cluster.storage[0].address) as probe:
            wait_until(lambda: probe.describe().sealed_bytes, what="the node knows the extent")
        if cleared == "before":  # only the pin has kept them, and it died; the bytes stay for a lease
            part.clear(ids)
        cluster.controller.kill()
        cluster.controller.restart()
        cluster.wait_attached()
        if cleared == "after the grace":
            time.sleep(2 * lease)
            part.clear(ids)
        filler = torch.zeros((1, MIB), dtype=torch.uint8)
        with pytest.raises(tq.StorageFull):  # all of the arena is written to, but for what the views show
            [part.put({"x": filler}) for _ in range(9)]
        assert batch["x"].unique().tolist() == [7]
        batch.verify()
        with node_probe(cluster.storage[0].address) as probe:
            sealed_bytes = probe.describe().sealed_bytes
            batch.close()
            wait_until(lambda: probe.describe().sealed_bytes < sealed_bytes, what="they are freed")


@pytest.fixture(scope="module")
def arena(cluster: LocalCluster) -> NDArray[np.uint8]:
    with node_probe(cluster.storage[0].address) as probe:
        return np.memmap(Path(probe.describe().arena_path), np.uint8, "r+")


@pytest.fixture(params=["shm", "grpc"])
def part(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[tq.Partition]:
    with tq.connect(cluster.address, transport=request.param, timeout=20) as client:
        yield client.create_partition(f"views-{request.param}-{request.function.__name__}")


def values(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)  # another one for each test: what is found in the arena is found once
    return {
        "x": torch.from_numpy(rng.integers(1 << 40, size=(ROWS, LENGTH))),
        "mm": [{"pixels": torch.from_numpy(rng.random((row + 500, 16)))} for row in range(ROWS)],
        "text": [f"row {row} {rng.random()} " * 200 for row in range(ROWS)],
    }


def flip(arena: NDArray[np.uint8], payload: bytes) -> None:
    """Changes one byte in the middle of where the payload lies."""
    at = arena.tobytes().find(payload)
    assert at >= 0
    arena[at + len(payload) // 2] ^= 1


def row_bytes(value: torch.Tensor) -> bytes:
    return value.numpy().tobytes()


def test_sound_views_verify(part: tq.Partition) -> None:
    put = values(1 if part.name.startswith("views-shm") else 4)
    part.put(put)
    batch = part.consumer("c").claim(ROWS, copy=False, timeout=5)
    batch.verify()
    batch.verify(["mm", "text"])
    assert torch.equal(batch["x"], put["x"])
    with pytest.raises(KeyError, match="nothing"):
        batch.verify(["nothing"])
    batch.ack()
    with pytest.raises(tq.InvalidArgument, match="closed or settled"):
        batch.verify()


def test_a_damaged_view_is_named_when_it_is_asked_for(cluster: LocalCluster, arena: NDArray[np.uint8]) -> None:
    with tq.connect(cluster.address, transport="shm", timeout=20) as client:
        part = client.create_partition("damaged-view")
        put = values(2)
        ids = part.put(put)
        flip(arena, row_bytes(put["x"][3]))
        with part.get(ids, copy=False) as batch:
            batch.verify(["mm", "text"])
            with pytest.raises(tq.CorruptBlock) as caught:
                batch.verify()
        assert str(caught.value).startswith(f"partition 'damaged-view', field 'x', row 3, sample {ids[3]}: ")
        assert (caught.value.rows, caught.value.ids) == ((3,), (int(ids[3]),))
        with pytest.raises(tq.CorruptBlock, match=f"sample {ids[3]}"):
            part.get(ids)
        flip(arena, row_bytes(put["mm"][5]["pixels"]))
        with part.get(ids, copy=False) as batch, pytest.raises(tq.CorruptBlock, match=f"'mm.*sample {ids[5]}"):
            batch.verify(["mm"])


def test_what_is_no_view_of_this_host_is_refused_at_once(cluster: LocalCluster, arena: NDArray[np.uint8]) -> None:
    with (
        tq.connect(cluster.address, transport="shm", timeout=20) as here,
        tq.connect(cluster.address, transport="grpc", timeout=20) as elsewhere,
    ):
        part, put = here.create_partition("no-view"), values(3)
        ids = part.put(put)
        flip(arena, put["text"][6].encode())
        with pytest.raises(tq.CorruptBlock, match=f"'text'.*sample ({ids[5]}|{ids[6]})"):  # made out of the bytes
            part.get(ids, copy=False)
        flip(arena, row_bytes(put["x"][2]))
        with pytest.raises(tq.CorruptBlock, match=f"'x'.*sample {ids[2]}"):
            elsewhere.partition("no-view").get(ids, fields=["x"], copy=False)
        # Rows that do not lie side by side in one block are copied, and copies are compared.
        with pytest.raises(tq.CorruptBlock, match=f"'x'.*sample {ids[2]}"):
            part.get([ids[2], ids[0]], fields=["x"], copy=False)
