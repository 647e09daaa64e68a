"""Permits as asyncio callers hold them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from tqclient.operations import permits
from tqclient.operations.permits import PermitHandle
from tqclient.permit import PermitData

if TYPE_CHECKING:
    from tqclient.aio import Client


class Permit(PermitData):
    """A permit; see `tqclient.permit.Permit`."""

    def __init__(self, client: Client, handle: PermitHandle) -> None:
        super().__init__(handle)
        self._client = client

    async def close(self) -> None:
        """Returns what is left. Repeatable; without effect after a fork."""
        if not self._client._state.forked:
            await self._client._run(permits.give_back(self._client._state, self._handle))

    async def __aenter__(self) -> Permit:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
