"""The connection beneath the client: partitions by name, calls in threads, groups of what is put."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from uuid import uuid4

import tqclient as tq
from tqclient import threads
from tqclient.compat.transfer_queue.config import Settings, address_of
from tqclient.compat.transfer_queue.errors import StorageKeyNotFoundError
from tqclient.compat.transfer_queue.taking import Ledger, unless
from tqclient.errors import PartitionExists, PartitionNotFound, SampleNotFound
from tqclient.partition import Partition

ATTEMPTS: Final = 65_535
"""Deliveries of a sample: ranks that ask for one batch at once give back what they claimed in vain."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Connection")


def twin(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Returns the async form of a blocking method: it runs in a thread of the client's."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.in_thread(partial(method, self, *args, **kwargs))

    run.__name__ = f"async_{method.__name__}"
    run.__doc__ = method.__doc__
    return run


class Connection:
    """A connection to the service, and what it knows of its partitions."""

    def __init__(self, client_id: str = "", controller_info: Any = None, **options: Any) -> None:
        """Connects.

        Args:
            client_id: a name; for the caller's own use.
            controller_info: `host:port` of the controller, or what `init` returned; None takes TQ_CONTROLLER, then this
                machine.
            options: of the original's sockets; without meaning here.
        """
        self.client_id = client_id
        self.address = controller_info if isinstance(controller_info, str) else address_of(controller_info)
        self.service = tq.connect(self.address)
        self.settings = Settings(self.service)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[Partition, Ledger]] = {}
        self._group_lock = threading.Lock()
        self._grouped: dict[int, int] = {}
        self._label = uuid4().hex

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that connected."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Ends the connection; samples stay. Repeatable; without effect after a fork."""
        if self.forked:
            return
        self.settings.release()
        self.service.close()

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Runs a blocking call beside the event loop. Where it waits for a batch and is cancelled, it takes none."""
        given_up = threading.Event()
        try:
            return await threads.begin(partial(unless, given_up, call))
        except asyncio.CancelledError:
            given_up.set()
            raise

    def on(self, name: str, action: Callable[[Partition, Ledger], T], *, create: bool = False) -> T:
        """Calls back with a partition; once more with the new one where it was cleared and made again.

        Raises:
            StorageKeyNotFoundError: there is no such partition, and it is not to be made.
        """
        for last in (False, True):
            try:
                part, ledger = self._partition(name, create)
                return action(part, ledger)
            except PartitionNotFound as error:
                with self._lock:
                    self._parts.pop(name, None)
                if last:
                    raise StorageKeyNotFoundError(f"partition {name!r} does not exist") from error
        raise AssertionError("unreachable")

    def _partition(self, name: str, create: bool) -> tuple[Partition, Ledger]:
        with self._lock:
            known = self._parts.get(name)
        if known is not None:
            return known
        try:
            part = self.service.partition(name)
        except PartitionNotFound:
            if not create:
                raise
            part = self._make(name)
        found = part, Ledger(self.service, part)
        with self._lock:
            return self._parts.setdefault(name, found)

    def _make(self, name: str) -> Partition:
        try:
            return self.service.create_partition(name, max_attempts=ATTEMPTS, exist_ok=True)
        except PartitionExists:  # somebody else made it at the same time, by other rules
            return self.service.partition(name)

    def found(self, name: str, action: Callable[[Partition], T]) -> T:
        try:
            return self.on(name, lambda part, _: action(part))
        except StorageKeyNotFoundError:
            raise
        except SampleNotFound as error:
            raise not_found(error) from None

    def clear_in(self, name: str, **chosen: Any) -> None:
        """Removes samples of a partition, chosen as for `Partition.clear`; nothing happens when there are none."""
        with suppress(StorageKeyNotFoundError):
            self.on(name, lambda part, _: part.clear(**chosen))

    def put_grouped(self, part: Partition, rows: int, size: int, put: Callable[[list[str]], T]) -> T:
        """Puts rows with their groups: each `size` new rows that this client puts after another are one."""
        with self._group_lock:
            start = self._grouped.get(part._ref.partition_id, 0)
            done = put([f"{self._label}/{(start + row) // size}" for row in range(rows)])
            self._grouped[part._ref.partition_id] = start + rows
            return done


def not_found(error: SampleNotFound) -> StorageKeyNotFoundError:
    """Returns the error as callers of the original expect it."""
    return StorageKeyNotFoundError(error.message, ids=error.ids, rows=error.rows, existing_ids=error.existing_ids)
