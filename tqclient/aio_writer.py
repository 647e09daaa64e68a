"""Rows that a producer fills in where they will lie, published by an awaitable call."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tqclient.operations.allocate import Allocation, publish
from tqclient.writer import WriterData

if TYPE_CHECKING:
    from tqclient.aio import Client


class Writer(WriterData):
    """See `tqclient.Writer`."""

    def __init__(self, client: Client, allocation: Allocation) -> None:
        super().__init__(client._state, allocation)
        self._client = client

    async def commit(self, *, timeout: float | None = None) -> NDArray[np.int64]:
        """Publishes the rows; returns their ids."""
        return await self._client._run(publish(self._state, self._allocation, timeout))

    async def __aenter__(self) -> Writer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
