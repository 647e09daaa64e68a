"""All that the core knows, and the look-ups that every command shares."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tqclient.errors import InvalidArgument, PartitionNotFound
from tqclient.wire.v1 import common_pb2, controller_pb2
from tqserver.controller.core import effects, limits, validate
from tqserver.controller.core.blocks import BlockRecord, BlockTable
from tqserver.controller.core.changes import Retired
from tqserver.controller.core.dedup import Replies
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.sessions import Leases, Session

Effects = list[effects.Effect]


class Checked:
    """Commits that were checked and not applied yet: unpacking 8,192 rows takes as long as applying them."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[controller_pb2.CommitRequest, validate.Commit]] = OrderedDict()

    def add(self, request: controller_pb2.CommitRequest, unpacked: validate.Commit) -> None:
        """Keeps what a request was unpacked to, for a while."""
        self._entries[id(request)] = request, unpacked  # the request is kept too, so that its id stays its own
        if len(self._entries) > limits.CHECKED_COMMITS_MAX:
            self._entries.popitem(last=False)

    def pop(self, request: controller_pb2.CommitRequest) -> validate.Commit | None:
        """Returns what this very object was unpacked to, if that is still known."""
        known = self._entries.pop(id(request), None)
        return known[1] if known else None


@dataclass(slots=True)
class State:
    """Everything behind `Core`.

    Attributes:
        leases: sessions and claims.
        sequence: of the last command applied.
        epoch: starts of the controller.
        topology_version: changes of the set of nodes.
        next_*: ids that come next; none is ever used twice.
        partitions: by id.
        names: partition name → id.
        nodes: by name, as they introduced themselves; what they report after that is the shell's to fill in.
        arenas: arena → name of the node that it was first seen at.
        orphans: (partition_id, consumer, dp_rank) of a rank without members → when it gives its shares back; dp_rank
            None → when nobody waits any more for the ranks without members; volatile.
        last_pin: counts within the epoch; volatile.
        retired: what changed in retired partitions; volatile.
        chosen: ids that a user's sampler chose for the claim that is being applied: int64; empty: none did. None: no
            command is being applied.
        checked: a cache.
    """

    leases: Leases
    sequence: int = 0
    epoch: int = 0
    topology_version: int = 0
    next_partition: int = 1
    next_sample: int = 1
    next_block: int = 1
    next_claim: int = 1
    next_session: int = 1
    next_permit: int = 1
    partitions: dict[int, Partition] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    blocks: BlockTable = field(default_factory=BlockTable)
    replies: Replies = field(default_factory=Replies)
    nodes: dict[str, controller_pb2.Node] = field(default_factory=dict)
    arenas: dict[int, str] = field(default_factory=dict)
    orphans: dict[tuple[int, str, int | None], float] = field(default_factory=dict)
    last_pin: int = 0
    retired: Retired = field(default_factory=Retired)
    chosen: bytes | None = None
    checked: Checked = field(default_factory=Checked)

    def session_of(self, mutation: common_pb2.Mutation) -> Session:
        """Returns the live session that asks.

        Raises:
            LeaseExpired: it has ended.
            InvalidArgument: it is another client's.
        """
        session = self.leases.session(mutation.session)
        if session.client_id != mutation.client_id:
            raise InvalidArgument(f"session {session.session} belongs to another client")
        return session

    def partition(self, partition_id: int, name: str = "") -> Partition:
        """Returns a partition by id, or by name when the id is 0.

        Raises:
            PartitionNotFound: there is none, or none any more.
        """
        found = self.partitions.get(partition_id or self.names.get(name, 0))
        if found is None:
            what = f"id {partition_id}" if partition_id else f"name {name!r}"
            raise PartitionNotFound(f"no partition has the {what}; it was never made, or deleted since")
        return found

    def emptied(self, records: list[BlockRecord], now: float, out: Effects) -> None:
        """Blocks lost their last row: they no longer count for their partition, and go unless a claim covers them."""
        for record in records:
            partition = self.partitions.get(record.partition_id)
            if partition is not None:
                partition.size_bytes -= record.size_bytes
        out += self.blocks.retire(records, now)
