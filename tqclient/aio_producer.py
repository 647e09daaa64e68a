"""Producers as asyncio callers hold them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from tqclient.info import PartitionRef
from tqclient.operations import producers

if TYPE_CHECKING:
    from tqclient.aio import Client


class Producer:
    """A registration; see `tqclient.producer.Producer`."""

    def __init__(self, client: Client, ref: PartitionRef) -> None:
        """Made by `Partition.producer`."""
        self._client = client
        self._ref = ref

    async def __aenter__(self) -> Producer:
        await self._client._run(producers.register(self._client._state, self._ref))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._client._state.forked:
            await self._client._run(producers.unregister(self._client._state, self._ref))
