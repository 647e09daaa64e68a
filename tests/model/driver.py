"""Builds commands for the core and journals them; for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import numpy as np

from tqclient import limits
from tqclient.schema import Form
from tqclient.wire.packing import I64, U8, U32, pack_array, pack_blobs, pack_strings
from tqclient.wire.v1 import common_pb2, journal_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core, Demand, Freed, Outcome, Sealed
from tqserver.controller.core.consumer import DEAD, LEASED

NODE, ARENA = "node-0", 0xA12E4A
BLOCK_BYTES = 512
FORM = Form("dense", "torch", "float32", (2,)).to_bytes()
LEASE = 10.0


def client_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Driver:
    """One core, its journal, its clock, and a storage node that believes its orders."""

    def __init__(self) -> None:
        self.core = Core(session_lease=LEASE)
        self.now = 1000.0
        self.log: list[tuple[journal_pb2.Command, int]] = []
        self.requests: dict[int, int] = {}
        self.offset = 0
        self.sealed: set[tuple[int, ...]] = set()
        self.quiet_until = 0.0  # until then nothing may be freed
        self.send("attach_node", pb.NodeHello(node=pb.Node(name=NODE, address="127.0.0.1:1", arena=ARENA)))
        self.send("start", journal_pb2.Start())

    def send(self, kind: str, body: Any, *, client: int = 1, session: int = 0, settled_below: int = 1) -> Outcome:
        """Journals and applies a command."""
        if "mutation" in body.DESCRIPTOR.fields_by_name:
            self.requests[client] = self.requests.get(client, 0) + 1
            body.mutation.client_id = client_id(client)
            body.mutation.request = self.requests[client]
            body.mutation.settled_below = settled_below
            body.mutation.session = session
        return self.journal(journal_pb2.Command(**{kind: body}))

    def ok(self, kind: str, body: Any, **options: Any) -> Any:
        """Sends a command that must succeed; returns its reply."""
        outcome = self.send(kind, body, **options)
        if outcome.error is not None:
            raise outcome.error
        return outcome.reply

    def journal(self, command: journal_pb2.Command) -> Outcome:
        self.log.append((command, len(self.log) + 1))
        outcome = self.core.apply(command, self.now, len(self.log))
        self.believe(outcome.effects)
        return outcome

    def believe(self, effects: Sequence[Any]) -> list[tuple[int, ...]]:
        """Carries out the orders to the node; returns the extents that were freed."""
        freed = []
        for effect in effects:
            if isinstance(effect, Sealed | Freed):
                assert (effect.node, effect.arena) == (NODE, ARENA)
                for extent in map(tuple, effect.extents.tolist()):
                    if isinstance(effect, Sealed):
                        assert extent not in self.sealed
                        self.sealed.add(extent)
                    else:
                        assert self.now >= self.quiet_until
                        self.sealed.remove(extent)  # KeyError: freed twice, or never sealed
                        freed.append(extent)
        return freed

    def synced(self) -> set[tuple[int, ...]]:
        """Returns what a NodeSync would say."""
        return set(map(tuple, extents_of(self.core, NODE, ARENA)))

    def open(self, client: int = 1) -> int:
        return int(
            self.ok("open_session", pb.OpenSessionRequest(wire_version=limits.WIRE_VERSION), client=client).session
        )

    def partition(self, session: int, name: str = "p", *, consumers: Sequence[str] = ("x",), **policy: Any) -> int:
        full = pb.Policy(**{"keep": False, **policy})  # said by every client that knows of retirement
        request = pb.CreatePartitionRequest(name=name, consumers=consumers, policy=full)
        return int(self.ok("create_partition", request, session=session).partition.partition_id)

    def commit(
        self,
        partition: int,
        rows: int,
        fields: Sequence[str] = ("a",),
        *,
        ids: Sequence[int] | None = None,
        keys: Sequence[str] | None = None,
        groups: Sequence[Any] | None = None,
        versions: Sequence[int] | None = None,
        tags: Sequence[dict[str, Any]] | None = None,
        upsert: bool = False,
        skip: Sequence[int] = (),
        blocks: Sequence[int] = (),
        form: bytes = FORM,
        lengths: dict[str, Sequence[int]] | None = None,
    ) -> pb.CommitRequest:
        """Builds a commit whose extents follow the last one's; `blocks` are the rows of each."""
        request = pb.CommitRequest(partition_id=partition, rows=rows, upsert=upsert)
        request.fields.extend(pb.Field(name=name, form=form) for name in fields)
        for count in blocks or (rows,):
            extent = common_pb2.Extent(
                node=NODE, arena=ARENA, offset=self.offset, length=BLOCK_BYTES, generation=1 + self.offset // (1 << 14)
            )
            request.blocks.add(rows=count, extents=[extent], directory=b"directory")
            self.offset += BLOCK_BYTES
        if ids is not None:
            request.ids = pack_array(list(ids), I64)
        if keys is not None:
            request.keys.CopyFrom(pack_strings(list(keys)))
        if groups is not None:
            request.groups.CopyFrom(pack_blobs([msgpack.packb(group) if group != "" else b"" for group in groups]))
        if versions is not None:
            request.version_min = request.version_max = pack_array(list(versions), I64)
        if tags is not None:
            request.tags.CopyFrom(pack_blobs([msgpack.packb(tag) if tag else b"" for tag in tags]))
        for field, values in (lengths or {}).items():
            request.lengths.add(field=field, lengths=pack_array(list(values), U32))
        if len(skip):
            request.skip = pack_array(list(skip), U8)
        return request

    def put(self, session: int, partition: int, rows: int, fields: Sequence[str] = ("a",), **options: Any) -> list[int]:
        """Commits and returns the ids."""
        return unpack(self.ok("commit", self.commit(partition, rows, fields, **options), session=session).ids)

    def claim(self, session: int, partition: int, batch: int, fields: Sequence[str] = (), **options: Any) -> Any:
        """Claims, with `sampler` as (name, params) and what else `claim_request` takes."""
        client = options.pop("client", 1)
        return self.ok(
            "claim", claim_request(partition, batch, fields=fields, **options), session=session, client=client
        )

    def demand(self, request: Any, session: int = 1) -> Demand:
        """Returns what a put or permit of a session needs now."""
        request.mutation.session = session
        return self.core.demand(request)

    def describe(self, partition: int) -> pb.Partition:
        """Describes a partition; a count below zero has no place in a description."""
        try:
            return self.core.describe_partition(partition)
        except ValueError as negative:
            raise AssertionError(f"counts_always_add_up: {negative}") from negative

    def live_versions(self, partition: int) -> list[int]:
        """Returns the weight version of each live sample, from the core's own table."""
        samples = self.core._state.partition(partition).samples
        return list(samples.version_max[samples.slots()].tolist())

    def handed_out(self, partition: int, consumers: Iterable[str]) -> set[int]:
        """Returns the samples that are leased to one of the consumers, or dead, from the core's own tables."""
        found = self.core._state.partition(partition)
        slots = found.samples.slots()
        states = [found.consumers[name].state[slots] for name in consumers]
        chosen = np.isin(states, (LEASED, DEAD)).any(axis=0)
        return set(found.samples.ids[slots[chosen]].tolist())

    def settle(self, session: int, claim: int, *, ack: bool = True) -> None:
        verdict = pb.VERDICT_ACK if ack else pb.VERDICT_RELEASE
        self.ok("settle", pb.SettleRequest(claim_id=claim, verdict=verdict), session=session)

    def counts(self, partition: int, consumer: str = "x") -> tuple[int, int, int, int, int]:
        """Returns pending, ready, leased, consumed, dropped."""
        described = self.core.describe_partition(partition)
        found = next(c for c in described.consumers if c.name == consumer)
        return found.pending, found.ready, found.leased, found.consumed, found.dropped


def extents_of(core: Core, node: str, arena: int) -> list[list[int]]:
    """Returns the extents that a NodeSync tells: offset, length, generation, partition."""
    parts, _ = core.node_sync(node, arena)
    return [extent for part in parts for extent in part.tolist()]


def claim_request(
    partition: int,
    batch: int,
    *,
    consumer: str = "x",
    sampler: str = "",
    params: dict[str, Any] | None = None,
    where: dict[str, Any] | None = None,
    **options: Any,
) -> pb.ClaimRequest:
    """Builds a ClaimRequest; `options` are further fields of it."""
    request = pb.ClaimRequest(partition_id=partition, consumer=consumer, batch_size=batch, **options)
    if sampler:
        request.sampler.name, request.sampler.params = sampler, msgpack.packb(params or {})
    if where is not None:
        request.where = msgpack.packb(where)
    return request


def unpack(ids: bytes) -> list[int]:
    return np.frombuffer(ids, dtype="<i8").tolist()


def ids(*values: int) -> bytes:
    return pack_array(list(values), I64)
