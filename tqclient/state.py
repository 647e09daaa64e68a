"""What one client knows and holds; shared by its threads, those behind it and its operations. Nothing in it blocks."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from tqclient.counters import Counters
from tqclient.directories import DirectoryCache
from tqclient.errors import InvalidArgument, TQError, UnsupportedValue
from tqclient.numbering import Numbering
from tqclient.operations.effects import CLOSED, Backoff, Deadline
from tqclient.paths import Paths
from tqclient.placement import Placement
from tqclient.windows import Cut, WindowPool
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import common_pb2, controller_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tqclient.transport.base import NodeTransport

OpenTransport = Callable[[controller_pb2.Node, float], "NodeTransport"]
"""(node, seconds) → the path to it; blocks, and raises TransportUnavailable or Unavailable."""
Allocate = Callable[[int], "NDArray[np.uint8]"]
"""size in bytes → uint8 [size], 64-byte aligned: where values go that are read."""

LAG_MAX: Final = 1024
"""Requests behind one that waits for long, from which on the controller is told which of them are settled."""
USAGE_SECONDS: Final = 5.0
"""How old the nodes' reported use may be for a client that goes on putting to several of them."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session of this client at the controller.

    Attributes:
        session: its number.
        lease_ms: milliseconds that it lives without a heartbeat.
        narrow_lengths: whether the controller reads the lengths of rows in fewer than four bytes each.
    """

    session: int
    lease_ms: int
    narrow_lengths: bool = False


@dataclass(frozen=True, slots=True)
class LostClaim:
    """A claim that nobody in this client holds any more: the chores give it back.

    Attributes:
        session: under which it was, or may have been, granted.
        claim_id: 0 when the reply was lost; then `request` is repeated, as abandoned, to learn it.
        request: of the claim.
    """

    session: int
    claim_id: int
    request: controller_pb2.ClaimRequest | None = None

    def __str__(self) -> str:
        return f"claim {self.claim_id} of session {self.session}"


@dataclass(slots=True)
class LostPermit:
    """A permit that nobody in this client holds any more: the chores give it back.

    Attributes:
        session: under which it was, or may have been, granted.
        partition_id: that it is for.
        permit: 0 when the reply was lost; then `request` is repeated to learn it.
        request: for the permit.
    """

    session: int
    partition_id: int
    permit: int
    request: controller_pb2.AcquirePermitRequest | None = None

    def __str__(self) -> str:
        return f"permit {self.permit} of session {self.session}"


@dataclass(frozen=True, slots=True)
class LostPut:
    """A put whose outcome is not known. When nobody waits for it any more, the chores learn it, and book its room.

    Attributes:
        commit: as it was sent.
        cuts: where its bytes lie.
    """

    commit: controller_pb2.CommitRequest
    cuts: list[Cut]


class ClientState:
    """Everything that the operations of one client share.

    Args:
        address: of the controller, for messages.
        timeout: seconds; the default of every call.
        open_transport: opens the path to a storage node.
        allocate: gives the memory of what is read.
        clock: monotonic seconds.
        rng: of jitter.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        open_transport: OpenTransport,
        allocate: Allocate,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.open_transport = open_transport
        self.allocate = allocate
        self.clock = clock
        self.rng = rng or random.Random()
        self.client_id = secrets.token_bytes(16)
        self.requests = Numbering()
        self.tickets = Numbering()  # of reservations
        self.windows = WindowPool(clock)
        self.paths = Paths(clock)
        self.directories = DirectoryCache()
        self.counters = Counters()
        self.opening = threading.Lock()
        self.hurry = threading.Event()  # wakes the heartbeat
        self.wake = threading.Event()  # wakes the chores
        self.lost_claims: deque[LostClaim] = deque()
        self.lost_permits: deque[LostPermit] = deque()
        self.lost_puts: deque[LostPut] = deque()
        self.forgotten: deque[Callable[[], None]] = deque()  # what finalizers leave to be done: it takes locks
        self.producing: dict[int, int] = {}  # partition → registrations as its producer
        self.retracting: set[int] = set()  # partitions whose registration is to end
        self.produced_in: dict[int, int] = {}  # partition → session that is registered
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the finalizer of a batch may run inside any holder
        self._session: Session | None = None
        self._closed = False
        self._nodes: dict[str, controller_pb2.Node] = {}
        self.placement = Placement(clock, self.rng.random)
        self._usage_at = clock()
        self._dropped_pins: deque[int] = deque()
        self._pin_numbers = itertools.count(1)
        self._held_pins: dict[int, list[int]] = {}  # pin → the blocks that it covers
        self.epoch = 0
        self.topology_version = 0
        self.paths_due = False  # there are other nodes than before
        self.lease_ms = 0

    def __reduce__(self) -> NoReturn:
        """Raises UnsupportedValue: what has a client cannot be pickled, nor copied deeply."""
        raise UnsupportedValue(
            "a client, and its partitions, consumers, loaders and claimed batches, are of the process that connected: "
            "send names, and call tq.connect() where they are needed"
        )

    def deadline(self, timeout: float | None, *, waits: bool = False) -> Deadline:
        """Starts the deadline of a call; None takes the client's default."""
        self.check_usable()
        return Deadline(self.timeout if timeout is None else timeout, self.clock, waits=waits)

    def backoff(self) -> Backoff:
        """Returns the pauses of a new series of tries."""
        return Backoff(self.rng)

    def check_usable(self) -> None:
        """Raises InvalidArgument when the client was closed, or made in the parent of this process."""
        self.check_process()
        if self._closed:
            raise InvalidArgument(CLOSED)

    def check_process(self) -> None:
        """Raises InvalidArgument in a child of the process that connected."""
        if self.forked:
            raise InvalidArgument(
                f"this client was connected in process {self._pid} and cannot be used after a fork, in process "
                f"{os.getpid()}: call tq.connect() again here, or start processes with the 'spawn' method"
            )

    @property
    def closed(self) -> bool:
        """Whether `mark_closed` was called."""
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that connected.

        All that the child has inherited is the parent's: its claims, permits and rows, its sockets, and the addresses
        where it had memory. Whatever ends one of them does nothing there, and takes no lock, which a thread may have
        held that is not there.
        """
        return os.getpid() != self._pid

    def mark_closed(self) -> bool:
        """Refuses every later call; returns False when that was so already."""
        with self._lock:
            first, self._closed = not self._closed, True
        self.hurry.set()
        self.wake.set()
        return first

    def mutation(self, number: int, session: Session | None) -> common_pb2.Mutation:
        """Returns what a mutation says of its caller."""
        mutation = common_pb2.Mutation(
            client_id=self.client_id,
            request=number,
            settled_below=self.requests.settled_below(),
            session=session.session if session else 0,
        )
        if number - mutation.settled_below > LAG_MAX:
            mutation.settled_until, still = self.requests.still_open()
            mutation.open = pack_array(still, U64)
        return mutation

    @property
    def session(self) -> Session | None:
        """The live session as far as this client knows."""
        return self._session

    def session_opened(self, reply: controller_pb2.OpenSessionReply) -> Session:
        """Books a new session."""
        session = Session(reply.session, reply.lease_ms, reply.narrow_lengths)
        with self._lock:
            self._session = session
            self.epoch = reply.epoch
            self.lease_ms = reply.lease_ms
            self._dropped_pins.clear()
            self._held_pins.clear()
        self.nodes_changed(list(reply.nodes), self.topology_version)
        self.hurry.set()
        self.wake.set()
        return session

    def session_ended(self, session: Session) -> None:
        """Books that a session has ended; what it held is gone.

        Repeatable, and to be repeated by whoever finds out: a late put may have prepared the session's writes again.
        """
        with self._lock:
            if self._session is session:
                self._session = None
        self.paths.session_ended(session.session)
        if self.windows.forget(session.session):
            self.wake.set()  # the chores close what only this client knows to be safe

    def put_lost(self, *lost: LostPut) -> None:
        """Has the chores find out what became of puts."""
        self.lost_puts.extend(lost)
        self.wake.set()

    def lease_seen(self, lease_ms: int) -> None:
        """Notes a lease that this client has to renew; a shorter one hastens the heartbeat."""
        if 0 < lease_ms < self.lease_ms:
            self.lease_ms = lease_ms
            self.hurry.set()

    def new_pin(self) -> int:
        """Returns a number for a read pin that this client never used before."""
        return next(self._pin_numbers)

    def hold_pin(self, session: Session, pin: int, block_ids: Iterable[int], *, epoch: int) -> None:
        """Notes a read pin that the controller gave at that epoch, to be taken again when it has restarted."""
        with self._lock:
            if self._session is session:
                self._held_pins[pin] = list(block_ids)
                if epoch != self.epoch:  # it may have restarted in between
                    self.epoch = 0

    def held_pins(self, session: Session) -> dict[int, list[int]]:
        """Returns the read pins that a session holds, with the blocks that each covers."""
        with self._lock:
            return dict(self._held_pins) if self._session is session else {}

    def drop_pin(self, session: int, pin: int) -> None:
        """Notes that a read pin is not needed any more; the next Locate or Heartbeat carries it."""
        if self.forked:
            return
        with self._lock:
            if self._session is not None and self._session.session == session:
                self._held_pins.pop(pin, None)
                self._dropped_pins.append(pin)

    def run_forgotten(self) -> None:
        """Does what finalizers left to be done."""
        with suppress(IndexError):
            while True:
                self.forgotten.popleft()()

    def take_dropped_pins(self) -> list[int]:
        """Returns the pins to drop, which are the caller's to deliver."""
        pins = []
        with suppress(IndexError):
            while True:
                pins.append(self._dropped_pins.popleft())
        return pins

    def return_dropped_pins(self, session: Session, pins: list[int]) -> None:
        """Takes back pins that could not be delivered."""
        with self._lock:
            if self._session is session:
                self._dropped_pins.extend(pins)

    def is_live(self, session: Session) -> bool:
        """Whether this session is the live one as far as this client knows."""
        current = self._session
        return current is not None and current.session == session.session

    def nodes_changed(self, nodes: list[controller_pb2.Node], topology_version: int) -> None:
        """Books the storage nodes as the controller described them."""
        with self._lock:
            self._nodes = {node.name: node for node in nodes}
            self._usage_at = self.clock()
            self.topology_version = topology_version
        self.placement.reported()
        self.paths.nodes_changed(nodes)

    def usage_due(self) -> bool:
        """Whether the nodes' use should be asked for again: it is what puts are balanced by."""
        stale = self.clock() - self._usage_at >= USAGE_SECONDS
        return stale and len(self._nodes) > 1 and self.placement.placed_since_report

    @property
    def nodes(self) -> dict[str, controller_pb2.Node]:
        """The storage nodes by name."""
        return self._nodes

    def node_of(self, arena: int) -> controller_pb2.Node | None:
        """Returns the node that serves an arena."""
        return next((node for node in self._nodes.values() if node.arena == arena), None)

    def preferred_nodes(self) -> list[controller_pb2.Node]:
        """Returns the attached nodes in the order in which to try them: same host first, then most free bytes."""
        return self.placement.order((n for n in self._nodes.values() if n.attached), self.paths.mapped)

    def nodes_text(self, told: Mapping[str, TQError]) -> str:
        """Says of each node how many bytes are free on it, and how it refused a call."""
        return self.placement.to_text(self._nodes, told)
