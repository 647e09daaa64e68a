"""Rows that a producer fills in where they will lie."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqclient.operations.allocate import Allocation, abort, forget, publish
from tqclient.state import ClientState

if TYPE_CHECKING:
    from tqclient.client import Client


class WriterData(Mapping[str, Any]):
    """The tensors to be filled in, by field: `[rows, *shape]`, a list of one per row, or a dict of those.

    Their contents are arbitrary at first. After the commit they are nobody's: what is written to them from then on, by
    whoever holds one of them or a view of it, reaches no sample, and what they show is not defined.
    """

    def __init__(self, state: ClientState, allocation: Allocation) -> None:
        """Made by `Partition.allocate`."""
        self._state = state
        self._allocation = allocation
        self._finalizer = weakref.finalize(self, forget, state, allocation)
        self._finalizer.atexit = False

    def __getitem__(self, field: str) -> Any:
        return self._allocation.values[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._allocation.values)

    def __len__(self) -> int:
        return len(self._allocation.values)

    @property
    def in_arena(self) -> bool:
        """Whether the tensors lie in the arena itself; else the commit copies them there."""
        return self._allocation.place is not None

    def abort(self) -> None:
        """Gives the room back; nothing is stored. After a commit, again, or in a forked child: no effect.

        While a commit runs in another thread or task, it has effect once that has failed.

        Raises:
            Unavailable: the tensors cannot be taken back now, and nothing has changed: call it again.
        """
        abort(self._state, self._allocation)

    def __repr__(self) -> str:
        allocation = self._allocation
        where = "in the arena" if self.in_arena else "in this process"
        rows = allocation.prepared.plan.rows
        return f"<Writer of {rows} rows of {allocation.ref.name!r} {where}, {allocation.stage}>"


class Writer(WriterData):
    """Rows that are published by a blocking call; as a context manager, they are aborted when it is left without."""

    def __init__(self, client: Client, allocation: Allocation) -> None:
        super().__init__(client._state, allocation)
        self._client = client

    def commit(self, *, timeout: float | None = None) -> NDArray[np.int64]:
        """Publishes the rows. Nothing may be written to the tensors while it runs, or it may be stored or not.

        Args:
            timeout: seconds, the wait for room in the partition included.

        Returns:
            The samples' ids, int64 `[rows]`. Again: the same. While another thread or task commits the same rows, it
            waits for what comes of that.

        Raises:
            BackpressureTimeout, Unavailable: as `Partition.put`; what was filled in stays, and it can be called again.
                So it can after an interrupt, or the cancellation of its task. However often, it has one effect.
            LeaseExpired: the place is gone with the session, or with the storage node's arena; nothing was stored.
            DuplicateKey, SchemaMismatch, Sealed: as `Partition.put`.
            InvalidArgument: it was aborted.
        """
        return self._client._run(publish(self._state, self._allocation, timeout))

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
