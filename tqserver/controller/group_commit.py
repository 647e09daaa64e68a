"""Group commit: one thread appends to the journal whatever gathered while its last append was under way."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, NoReturn

from tqclient.errors import StorageFull, TQError, Unavailable
from tqserver import logs
from tqserver.controller.journal import Journal, JournalFailed

GROUP_RECORDS_MAX: Final = 4096
GROUP_BYTES_MAX: Final = 16 << 20
SLICE_S: Final = 0.004
"""How long answering may keep the event loop from everything else at one time."""
PAUSE_S: Final = 0.0002
"""Between two pieces of a snapshot: in which the event loop takes the interpreter's lock, if it wants it."""
PENDING_BYTES_MAX: Final = 512 << 20
"""Of records that wait for the disk; a call that would exceed it is told to come back."""
JOURNAL_FAILED_STATUS: Final = 4
"""The process's exit status when the disk failed under the journal."""

_log = logs.get("controller.journal")


class Entry(NamedTuple):
    """One record on its way to the disk.

    Attributes:
        record: the bytes.
        durable: called with its sequence once it is on disk.
        refused: called when the disk had no room for its group.
    """

    record: bytes
    durable: Callable[[int], None]
    refused: Callable[[TQError], None]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a snapshot took.

    Attributes:
        size_bytes: of it.
        seconds: of processor time.
    """

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Snapshot:
    sequence: int
    done: Callable[[], None]


class GroupCommit:
    """Appends records in the order in which they were submitted, and answers on the event loop in that order.

    A disk that fails ends the process at once: what is durable is then unknown, and only a fresh start may find out.

    Args:
        journal: used by this object's thread alone from now on, but for `Journal.failed`.
        answered: called on the loop after some callbacks; with True when they end with the end of a group, which is
            when a snapshot may be taken.
    """

    def __init__(self, journal: Journal, answered: Callable[[bool], None]) -> None:
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._answered = answered
        self._durable: deque[tuple[int, Entry, bool]] = deque()  # (sequence, entry, whether it ends its group)
        self._queue: queue.SimpleQueue[Entry | _Snapshot | None] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._held: list[_Snapshot | None] = []  # taken from the queue while a group gathered
        self._trimming = False
        self._saver: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="tq-journal", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        """Queues a record.

        Raises:
            Unavailable: too much waits for the disk already.
        """
        if self._pending_bytes + len(entry.record) > PENDING_BYTES_MAX:
            raise Unavailable(
                f"{self._pending_bytes} bytes wait for the controller's disk, at most {PENDING_BYTES_MAX}; try again"
            )
        self._pending_bytes += len(entry.record)
        self._queue.put(entry)

    def save(self, sequence: int, state: Iterable[bytes], done: Callable[[Saved], None]) -> None:
        """Writes a snapshot in a thread of its own, so that commits go on meanwhile.

        Args:
            sequence: of the last record that `state` covers; the end of a group.
            state: the snapshot, which that thread makes, piece by piece.
            done: called on the loop when it counts, or when there was no room for it.
        """

        def write() -> None:
            try:
                begun, chunks = time.thread_time(), []
                for chunk in state:
                    chunks.append(chunk)
                    time.sleep(PAUSE_S)
                saved = partial(done, Saved(sum(map(len, chunks)), time.thread_time() - begun))
                self._journal.write_snapshot(sequence, chunks)
            except StorageFull as error:
                _log.warning("no room for a snapshot; the journal grows until there is", error=str(error))
                self._loop.call_soon_threadsafe(saved)
            except Exception as error:
                _die(error)
            else:
                self._queue.put(_Snapshot(sequence, saved))

        self._saver = threading.Thread(target=write, name="tq-snapshot", daemon=True)
        self._saver.start()

    def close(self) -> None:
        """Waits until all that was submitted, and a snapshot under way, is on disk, and closes the journal; blocks."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._take()) is not None:
                if isinstance(item, Entry):
                    self._commit(self._gather(item))
                else:
                    self._install(item)
            if self._saver is not None:  # whoever opens the journal next removes what it has written up to then
                self._saver.join()
            self._journal.close()
        except Exception as error:
            _die(error)

    def _take(self) -> Entry | _Snapshot | None:
        if self._held:
            return self._held.pop()
        while self._trimming and self._queue.empty():
            self._trimming = self._trim()
        return self._queue.get()

    def _gather(self, head: Entry) -> list[Entry]:
        group, size_bytes = [head], len(head.record)
        while len(group) < GROUP_RECORDS_MAX and size_bytes < GROUP_BYTES_MAX:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if not isinstance(item, Entry):
                self._held.append(item)
                break
            group.append(item)
            size_bytes += len(item.record)
        return group

    def _commit(self, group: list[Entry]) -> None:
        try:
            first = self._journal.append([entry.record for entry in group])
        except StorageFull as error:
            _log.warning("no room for the journal; mutations are refused until there is", error=str(error))
            self._loop.call_soon_threadsafe(self._refuse, group, error)
        else:
            self._loop.call_soon_threadsafe(self._answer, group, first)

    def _answer(self, group: list[Entry], first: int) -> None:
        idle = not self._durable
        last = first + len(group) - 1
        self._durable.extend((sequence, entry, sequence == last) for sequence, entry in enumerate(group, first))
        if idle:
            self._answer_some()

    def _answer_some(self) -> None:
        until = time.perf_counter() + SLICE_S
        ends_group = False
        try:
            while self._durable:
                sequence, entry, ends_group = self._durable.popleft()
                self._pending_bytes -= len(entry.record)
                entry.durable(sequence)
                if time.perf_counter() >= until:
                    break
            self._answered(ends_group)
        finally:  # a callback that fails is logged by the loop; the others are answered all the same
            if self._durable:
                self._loop.call_soon(self._answer_some)

    def _refuse(self, group: list[Entry], error: StorageFull) -> None:
        for entry in group:
            self._pending_bytes -= len(entry.record)
            entry.refused(error)
        self._answered(False)

    def _install(self, snapshot: _Snapshot) -> None:
        try:
            self._journal.install_snapshot(snapshot.sequence)
            self._trimming = True
        except StorageFull as error:
            _log.warning("no room to install a snapshot; the journal grows until there is", error=str(error))
        self._loop.call_soon_threadsafe(snapshot.done)

    def _trim(self) -> bool:
        try:
            return self._journal.trim()
        except StorageFull as error:
            _log.warning("no room to trim the journal; the next snapshot tries again", error=str(error))
            return False


def _die(error: Exception) -> NoReturn:
    what = "the disk failed under the journal" if isinstance(error, JournalFailed) else "the journal's thread failed"
    _log.error(f"{what}; the process ends rather than guess what is durable", error=repr(error))
    os._exit(JOURNAL_FAILED_STATUS)
