"""One transfer engine of this process, for one peer: made, used and ended under the library's many conditions.

The memory that is registered with it outlives every transfer that may still touch it, and the engine itself outlives
all of them: what is given up on is polled to its end in the background.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import TransportUnavailable, Unavailable
from tqclient.memory import Memory
from tqclient.wire import mooncake
from tqclient.wire.addresses import join_address

ITEMS_MAX: Final = 1024
"""In flight to one peer; at about twice as many, the library begins to fail them."""
REAP_SECONDS: Final = 0.01
PARKED_MAX: Final = 8
"""Engines that are kept for the peers to come. More were in use at once, or the way to one peer broke as often."""
_TIGHT_SECONDS: Final = 100e-6
_PAUSE_MAX: Final = 300e-6
_DONE: Final = 1
_FAILED: Final = -1


@dataclass(slots=True)
class Counters:
    """Since the engine was made.

    Attributes:
        registrations: calls that registered memory: stays 1.
        transfers: that were submitted.
        failures: of them.
        bytes: that arrived.
        abandoned: transfers that have been given up on and have not ended yet.
    """

    registrations: int = 0
    transfers: int = 0
    failures: int = 0
    bytes: int = 0
    abandoned: int = 0


class Transfer:
    """One contiguous run of bytes on its way. It is polled by one thread at a time, to its end and never again.

    Attributes:
        local: uint8, the bytes on this side; they stay where they are for as long as this lives.
        remote: address at the peer.
        writes: to the peer, not from it.
    """

    __slots__ = ("_batch", "_engine", "local", "remote", "writes")

    def __init__(self, engine: Engine, local: NDArray[np.uint8], remote: int, *, writes: bool) -> None:
        self._engine = engine
        self.local = local
        self.remote = remote
        self.writes = writes
        self._batch = engine._submit(self)

    def poll(self) -> bool | None:
        """Returns whether it went well; None while that is open."""
        # 0 is no transfer: it could not be submitted.
        status = self._engine._check(self._batch) if self._batch else _FAILED
        if status not in (_DONE, _FAILED):  # -2 says that it takes long, not that it has ended
            return None
        self._engine._ended(self, went_well=status == _DONE)
        return status == _DONE

    def wait(self, deadline: float) -> bool | None:
        """Does as `poll`, until that is known or the deadline, in monotonic seconds, has passed."""
        started = time.monotonic()
        pause = 0.0
        while (outcome := self.poll()) is None:
            now = time.monotonic()
            if now >= deadline:
                return None
            if now - started > _TIGHT_SECONDS:
                pause = min(pause + _PAUSE_MAX / 6, _PAUSE_MAX)
            time.sleep(pause)
        return outcome


class Engine:
    """A transfer engine with one registered run of memory.

    It has holders: the transport, every call in progress, every transfer that was given up on. It ends with the last.

    Attributes:
        memory: all that is registered, uint8.
        address: `host:port`, under which peers open this engine.
        protocol: `tcp` or `rdma`: what it was seen to use.
        segment: of the peer.
        counters: of what it did.
    """

    def __init__(self, host: str, segment: str, memory_bytes: int, *, devices: str = "") -> None:
        """Makes it and registers the memory. Takes about 50 ms.

        Args:
            host: name or address of this host.
            segment: under which the peer is opened.
            memory_bytes: to be registered.
            devices: adapters to use, with commas; empty: all.

        Raises:
            TransportUnavailable: the library cannot be loaded, or says no.
        """
        self.segment = segment
        self.counters = Counters()
        self._lock = threading.Lock()
        self._holders = 1
        self._items = threading.BoundedSemaphore(ITEMS_MAX)
        self._abandoned: list[tuple[Transfer, Callable[[], None]]] = []
        self._ended_at = time.monotonic()
        memory = Memory(memory_bytes, inherited=False)
        memory.prefer_huge_pages()
        self.memory: NDArray[np.uint8] = memory.array()
        library = _Library.take(host, devices, segment, self.memory)
        self._library: _Library | None = library
        self.address = library.address
        self.protocol = library.protocol
        self.counters.registrations += 1

    def hold(self) -> None:
        """Adds a holder.

        Raises:
            Unavailable: it has ended.
        """
        with self._lock:
            if self._holders == 0:
                raise Unavailable(f"the engine for {self.segment} has ended")
            self._holders += 1

    def release(self) -> None:
        """Takes a holder away; with the last one, it ends."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            library, self._library = self._library, None
        if library is not None:
            library.park(self.memory)
            self.memory = np.empty(0, np.uint8)

    @property
    def takes_any_memory(self) -> bool:
        """Whether transfers may begin and end in memory of this process that is not registered.

        Over TCP, the library hands the address to a socket; an adapter moves nothing but what it has pinned.
        """
        return self.protocol == "tcp"

    @property
    def idle_seconds(self) -> float:
        """Since the last transfer ended."""
        return time.monotonic() - self._ended_at

    def try_item(self) -> bool:
        """Takes the right to one transfer, if it is to be had now; the transfer's end gives it back."""
        return self._items.acquire(blocking=False)

    def wait_item(self, timeout: float | None) -> bool:
        """Does as `try_item`, for at most so many seconds."""
        return self._items.acquire(timeout=timeout)

    def abandon(self, transfer: Transfer, ended: Callable[[], None]) -> None:
        """Polls a transfer to its end in the background, then calls `ended`; until then the engine lives."""
        self.hold()
        with self._lock:
            self.counters.abandoned += 1
            self._abandoned.append((transfer, ended))
            first = len(self._abandoned) == 1
        if first:
            threading.Thread(target=self._reap, name="tq-mooncake-reaper", daemon=True).start()

    def _reap(self) -> None:
        while True:
            with self._lock:
                waiting = list(self._abandoned)
            ended = [each for each in waiting if each[0].poll() is not None]
            for _, call in ended:
                call()
            with self._lock:
                self._abandoned = [each for each in self._abandoned if each not in ended]
                self.counters.abandoned -= len(ended)
                done = not self._abandoned
            for _ in ended:
                self.release()
            if done:
                return
            time.sleep(REAP_SECONDS)

    @property
    def _in_use(self) -> Any:
        assert self._library is not None  # who transfers is a holder
        return self._library.engine

    def _submit(self, transfer: Transfer) -> int:
        engine = self._in_use
        call = engine.batch_transfer_async_write if transfer.writes else engine.batch_transfer_async_read
        with self._lock:
            self.counters.transfers += 1
        batch: int = call(self.segment, [transfer.local.ctypes.data], [transfer.remote], [transfer.local.size])
        return batch

    def _check(self, batch: int) -> int:
        status: int = self._in_use.transfer_check_status(batch)
        return status

    def _ended(self, transfer: Transfer, *, went_well: bool) -> None:
        with self._lock:
            self._ended_at = time.monotonic()
            if went_well:
                self.counters.bytes += transfer.local.size
            else:
                self.counters.failures += 1
        self._items.release()


class _Library:
    """The library's part of an engine. It is never ended, but used again for another peer.

    To end it takes most of a second, in which no other Python thread runs, and for ever if a thread of its own is
    missing (after a fork) or a transfer is in progress (at the end of the process).

    Attributes:
        engine: the library's object.
        address: `host:port`, under which peers open it.
        protocol: `tcp` or `rdma`: what it was seen to use.
    """

    _parked: ClassVar[list[_Library]] = []
    _lock: ClassVar = threading.Lock()

    def __init__(self, host: str, devices: str) -> None:
        self.engine: Any = mooncake.load(host).TransferEngine()
        status = self.engine.initialize(host, "P2PHANDSHAKE", "rdma", devices)
        if status != 0:
            raise TransportUnavailable(f"the transfer engine does not start on {host!r}: initialize returned {status}")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.engine))  # never ended
        self.address = join_address(host, self.engine.get_rpc_port())
        self.protocol = mooncake.protocol_in_use()
        self._pid = os.getpid()
        self._made_for = host, devices
        self._opened: set[str] = set()

    @classmethod
    def take(cls, host: str, devices: str, segment: str, memory: NDArray[np.uint8]) -> _Library:
        """Returns one that has never opened this segment (what it knows of a peer outlives the peer), and registers."""
        with cls._lock:
            fit = (parked for parked in cls._parked if parked._serves(host, devices, segment))
            taken = next(fit, None)
            if taken is not None:
                cls._parked.remove(taken)
        taken = taken or cls(host, devices)
        status = taken.engine.register_memory(memory.ctypes.data, memory.size)
        if status != 0:
            with cls._lock:
                cls._parked.append(taken)
            hint = "; is the limit of locked memory (memlock) high enough?" if taken.protocol == "rdma" else ""
            raise TransportUnavailable(f"registering {memory.size} bytes returned {status}{hint}")
        taken._opened.add(segment)  # not before: one that could not register serves the next try
        return taken

    def _serves(self, host: str, devices: str, segment: str) -> bool:
        return self._made_for == (host, devices) and segment not in self._opened

    def park(self, memory: NDArray[np.uint8]) -> None:
        """Puts it aside until it is taken again; nothing of it touches the memory from here on."""
        if self._pid != os.getpid():
            return  # its threads are not there
        self.engine.unregister_memory(memory.ctypes.data)
        with self._lock:
            self._parked.append(self)
        self.end_parked(PARKED_MAX)

    @classmethod
    def end_parked(cls, kept: int) -> None:
        """Ends what has been parked for longest, but for so many."""
        with cls._lock:
            ending = cls._parked[: max(len(cls._parked) - kept, 0)]
            del cls._parked[: len(ending)]
        for library in ending:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(library.engine))
            del library.engine

    @classmethod
    def forget(cls) -> None:
        """In a forked child: whoever held the lock is not there, nor are the library's threads."""
        cls._lock = threading.Lock()
        cls._parked = []


os.register_at_fork(after_in_child=_Library.forget)


def end_parked() -> None:
    """Ends every engine that is parked, with its sockets. No thread of this process runs for about a second each."""
    _Library.end_parked(0)
