"""The environment names an HTTP proxy, as that of a company's cluster does: nobody of the job calls through it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import numpy as np
import pytest

import tqclient as tq
from tqserver.local import LocalCluster

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What listens there, and accepts nobody."""
    monkeypatch.setenv("TQ_LANE", "off")
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name in VARIABLES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield listening
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody came
            listening.accept()


def test_neither_daemons_nor_clients_take_a_proxy(no_leaks: None, proxy: socket.socket) -> None:
    async def get(address: str, id_: int) -> list[int]:
        async with tq.aio.connect(address, transport="grpc", timeout=10) as client:
            part = await client.partition("part")
            batch = await part.get([id_])
            return batch["x"].tolist()

    with LocalCluster(arena="32MiB") as cluster, tq.connect(cluster.address, transport="grpc", timeout=10) as client:
        ids = client.create_partition("part").put({"x": np.arange(3)})
        assert asyncio.run(get(cluster.address, int(ids[2]))) == [2]
