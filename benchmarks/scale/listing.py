"""Knowing what a partition holds: one listing, and then its changes, rather than listing it in a loop."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Final

import grpc
import torch

import tqclient as tq
from benchmarks.scale.peer import CALL_SECONDS, Peer
from benchmarks.statistics import Spread
from tqclient.wire.packing import I64, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb

ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Watching:
    """What a watcher is told of a partition, over a bare stub.

    Attributes:
        rows: in the partition.
        listing_ms: until it was told of every sample, once.
        change: from the start of a put of `ROWS` samples to the arrival of the change that names them.
    """

    rows: int
    listing_ms: float
    change: Spread


class _Watcher:
    """A watcher of one partition, which says when it learnt of how many samples."""

    def __init__(self, peer: Peer, part: tq.Partition) -> None:
        self.part = part
        self.seconds: list[float] = []
        self._arrivals: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        request = pb.WatchRequest(session=peer.session, partition_id=part._ref.partition_id)
        start = time.perf_counter()
        self._stream = peer.stub.Watch(request)
        listed, complete = 0, False
        while not complete:
            listing = next(self._stream).listing
            listed += len(unpack_array(listing.ids, I64, what="ids"))
            complete = listing.complete
        self.listing_ms = 1e3 * (time.perf_counter() - start)
        self.rows = listed
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for change in self._stream:
                if change.WhichOneof("change") == "written" and change.written.added:
                    self._arrivals.put((time.perf_counter(), len(change.written.ids) // I64.itemsize))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise

    def once(self) -> float:
        """Puts, and returns the seconds until all of it was heard of."""
        start = time.perf_counter()
        self.part.put({"tokens": [torch.zeros(1, dtype=torch.int16)] * ROWS})
        heard = 0
        while heard < ROWS:
            moment, rows = self._arrivals.get(timeout=CALL_SECONDS)
            heard += rows
        return moment - start

    def stop(self) -> None:
        """Ends the stream."""
        self._stream.cancel()
        self._thread.join()


def measure(address: str, parts: dict[int, tq.Partition], *, repeats: int) -> list[Watching]:
    """Watches partitions of several sizes, in turn.

    Args:
        address: of the controller.
        parts: rows in it → partition; they grow by this.
        repeats: puts to each.

    Raises:
        RuntimeError: a listing did not name every sample.
    """
    peer, channel = Peer.connect(address)
    with channel:
        watchers = [_Watcher(peer, part) for part in parts.values()]
        for rows, watcher in zip(parts, watchers, strict=True):
            if watcher.rows != rows:
                raise RuntimeError(f"{rows} samples were put, and {watcher.rows} listed")
        for _ in range(repeats):
            for watcher in watchers:
                watcher.seconds.append(watcher.once())
        for watcher in watchers:
            watcher.stop()
    return [Watching(each.rows, each.listing_ms, Spread.of(each.seconds)) for each in watchers]
