"""What is of the process that connected, on its way to another one."""

from __future__ import annotations

import asyncio
import copy
import pickle

import pytest
import torch

import tqclient as tq
from tqclient.torch import StreamingDataset, StreamingLoader
from tqserver.local import LocalCluster


def test_what_is_of_this_process_is_not_pickled(cluster: LocalCluster) -> None:
    with tq.connect(cluster.address) as client:
        check(client, client.create_partition("part"))


def check(client: tq.Client, part: tq.Partition) -> None:
    ids = part.put({"x": torch.arange(4)})
    consumer = part.consumer("actor")
    read = part.get(ids)
    with consumer.claim(2) as claimed:
        connected = [client, part, consumer, part.metadata, part.shard(1), part.producer()]
        for value in [*connected, StreamingLoader(consumer)]:
            with pytest.raises(tq.UnsupportedValue, match=r"of the process that connected"):
                pickle.dumps(value)
            with pytest.raises(TypeError):  # by which trainers find out what to leave out of a copy
                copy.deepcopy(value)
        for value in (read, claimed, tq.Batch.from_buffer(read.to_buffer())):
            with pytest.raises(tq.UnsupportedValue, match=r"send batch\.to_buffer\(\)"):
                pickle.dumps(value)
    with pytest.raises(tq.UnsupportedValue, match=r"use tq\.torch\.StreamingLoader, which has workers, too"):
        pickle.dumps(StreamingDataset(consumer))


def test_neither_is_what_an_asyncio_client_has(cluster: LocalCluster) -> None:
    async def main() -> None:
        async with tq.aio.connect(cluster.address) as client:
            part = await client.create_partition("part")
            for value in (client, part, part.consumer("actor"), part.metadata):
                with pytest.raises(tq.UnsupportedValue, match=r"of the process that connected"):
                    pickle.dumps(value)

    asyncio.run(main())
