"""Watching a partition, for blocking callers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import grpc

from tqclient.changes import Change
from tqclient.errors import TQError
from tqclient.operations.effects import CONTROLLER
from tqclient.operations.watch import Watcher, ended
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import controller_pb2 as pb

if TYPE_CHECKING:
    from tqclient.client import Client

AHEAD: Final = 8
"""Messages that are read before they are asked for; beyond it, the controller is held back."""


def watch(client: Client, watcher: Watcher) -> Generator[Change, None, None]:
    """Yields changes until nothing changed for the timeout."""
    while True:
        try:
            stream = _Stream(client, client._run(watcher.begin()))
        except TQError as error:
            client._run(watcher.recover(error))
            continue
        try:
            while True:
                changes = watcher.feed(stream.next(watcher.remaining()))
                yield from changes
                watcher.wait()
        except queue.Empty:
            return
        except TQError as error:
            failure = error
        finally:
            stream.close()
        client._run(watcher.recover(failure))


class _Stream:
    """A stream of the controller, read by a thread: a blocking stub can't wait for one message until a deadline."""

    def __init__(self, client: Client, request: pb.WatchRequest) -> None:
        self._state = client._state
        self._call = client._connection.channels.stub(CONTROLLER).Watch(request)
        self._messages: queue.Queue[pb.Change | TQError] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._read, name="tq-watch", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for change in self._call:
                self._messages.put(change)
            self._messages.put(ended())
        except grpc.RpcError as error:
            self._messages.put(from_rpc_error(error, peer="controller: Watch"))

    def next(self, seconds: float | None) -> pb.Change:
        """Returns the next message; raises `queue.Empty` when there is none in time, or what ended the stream."""
        message: Any = self._messages.get(timeout=seconds)
        if isinstance(message, TQError):
            raise message
        found: pb.Change = message
        return found

    def close(self) -> None:
        """Cancels the stream, and waits until its thread ended."""
        if self._state.forked:
            return
        self._call.cancel()
        while self._thread.is_alive():
            with suppress(queue.Empty):  # it may be about to put one more
                self._messages.get_nowait()
            self._thread.join(0.005)
