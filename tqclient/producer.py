"""Producers as blocking callers hold them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from tqclient.info import PartitionRef
from tqclient.operations import producers

if TYPE_CHECKING:
    from tqclient.client import Client


class Producer:
    """A registration as one that makes samples: from entering it as a context manager until leaving it."""

    def __init__(self, client: Client, ref: PartitionRef) -> None:
        """Made by `Partition.producer`."""
        self._client = client
        self._ref = ref

    def __enter__(self) -> Producer:
        self._client._run(producers.register(self._client._state, self._ref))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._client._state.forked:
            self._client._run(producers.unregister(self._client._state, self._ref))

    def __repr__(self) -> str:
        return f"<Producer for partition {self._ref.name!r}>"
