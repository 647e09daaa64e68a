"""One partition: its policies, its samples and its consumers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument, SampleNotFound
from tqclient.wire.v1 import controller_pb2
from tqserver.controller.core import limits
from tqserver.controller.core.consumer import CONSUMED, DEAD, LEASED, OPEN, STALE, Consumer
from tqserver.controller.core.samples import SampleTable, Slots
from tqserver.controller.core.view import View


class Partition:
    """A named set of samples.

    Attributes:
        partition_id: never reused.
        name: until it is deleted.
        policy: with its defaults filled in.
        accepts_any: it was made without consumers, so any name may claim.
        sealed: takes no more samples.
        version: current weight version; -1: none.
        metadata: values opaque to the controller.
        size_bytes: of the blocks that have a live row.
        samples: the rows.
        consumers: name → progress.
    """

    def __init__(self, partition_id: int, name: str, policy: controller_pb2.Policy, accepts_any: bool) -> None:
        self.partition_id = partition_id
        self.name = name
        self.policy = policy
        self.accepts_any = accepts_any
        self.sealed = False
        self.version = -1
        self.metadata: dict[str, bytes] = {}
        self.size_bytes = 0
        self.samples = SampleTable()
        self.consumers: dict[str, Consumer] = {}
        # Names that asked but were granted nothing yet: a cache of what they would see.
        self._provisional: OrderedDict[str, Consumer] = OrderedDict()

    def __str__(self) -> str:
        return f"partition {self.name!r}"

    # Consumers.

    def check_consumer(self, name: str) -> None:
        """Raises InvalidArgument when this name may not consume here."""
        if name in self.consumers:
            return
        if not self.accepts_any:
            raise InvalidArgument(f"{self} has no consumer {name!r}; it has: {', '.join(self.consumers)}")
        self.check_consumer_count(1)

    def check_consumer_count(self, added: int) -> None:
        """Raises InvalidArgument when there is no room for so many more consumers."""
        if len(self.consumers) + added > wire_limits.CONSUMERS_MAX:
            raise InvalidArgument(
                f"{self}: {len(self.consumers) + added} consumers, at most {wire_limits.CONSUMERS_MAX}"
            )

    def tracked(self, name: str) -> Consumer:
        """Returns a consumer's progress, or what a new one of that name would have; `check_consumer` has passed."""
        consumer = self.consumers.get(name) or self._provisional.get(name)
        if consumer is None:
            consumer = self._provisional[name] = self.fresh(name)
            if len(self._provisional) > limits.PROVISIONAL_CONSUMERS_MAX:
                self._provisional.popitem(last=False)
        return consumer

    def admit(self, name: str) -> Consumer:
        """Returns a consumer, and from here on it is one of the partition's."""
        consumer = self.consumers.get(name)
        if consumer is None:
            consumer = self._provisional.pop(name) if name in self._provisional else self.fresh(name)
            self.consumers[name] = consumer
        return consumer

    def fresh(self, name: str) -> Consumer:
        """Returns the progress of one who comes now: every live sample is open, or stale."""
        consumer = Consumer(name, self.samples.capacity, self.samples.written)
        used = slice(0, self.samples.size)
        consumer.begin(self.samples.alive[used], self.stale(used))
        return consumer

    def everyone(self) -> Iterator[Consumer]:
        """All whose progress is tracked, with those that were granted nothing yet."""
        return chain(self.consumers.values(), self._provisional.values())

    def fields_of(self, fields: Iterable[str]) -> tuple[str, ...]:
        """Returns a field set as views know it: sorted, and all of the partition's when none is named."""
        return tuple(sorted(fields)) or tuple(sorted(self.samples.columns))

    def view(self, consumer: Consumer, fields: Iterable[str]) -> View:
        """Returns a consumer's view over a field set."""
        return consumer.view(self.fields_of(fields), self.samples.size)

    def waiting(self) -> Iterator[Consumer]:
        """Those of `everyone` that were granted nothing yet."""
        return iter(self._provisional.values())

    # Samples.

    def find(self, ids: NDArray[np.int64]) -> Slots:
        """Returns the slots of samples.

        Raises:
            SampleNotFound: naming every missing id.
        """
        slots = self.samples.find(ids)
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            listed = ids[missing[: wire_limits.ERROR_IDS_MAX]].tolist()
            raise SampleNotFound(
                f"{self}: {len(missing)} of {len(ids)} samples do not exist or were cleared: {_listing(listed)}",
                ids=listed,
                rows=missing[: wire_limits.ERROR_IDS_MAX].tolist(),
            )
        return slots

    def stale(self, slots: Any) -> NDArray[np.bool_]:
        """Returns which samples max_staleness rules out: their oldest weights are too far behind the version."""
        oldest = self.samples.version_min[slots]
        if not self.policy.HasField("max_staleness"):
            return np.zeros(len(oldest), dtype=np.bool_)
        stale: NDArray[np.bool_] = (oldest >= 0) & (self.version - oldest > self.policy.max_staleness)
        return stale

    def reserve(self, rows: int) -> None:
        """Makes room for more samples."""
        if self.samples.reserve(rows):
            for consumer in self.everyone():
                consumer.resize(self.samples.capacity)

    def apply_staleness(self, slots: Slots) -> None:
        """Drops the open samples that are stale now, and takes back those that an upsert made fresh again.

        So whether an unsettled sample is dropped follows from its versions alone, for consumers that come later too.
        """
        if not self.policy.HasField("max_staleness"):
            return
        stale = self.stale(slots)
        for consumer in self.everyone():
            states = consumer.state[slots]
            consumer.move(slots[stale & (states == OPEN)], STALE)
            consumer.move(slots[~stale & (states == STALE)], OPEN)

    def remove(self, slots: Slots) -> NDArray[np.uint64]:
        """Removes samples, each named once; returns one block id per field that they had."""
        blocks = self.samples.remove(slots)
        for consumer in self.everyone():
            consumer.vacate(slots)
        if self.samples.wants_compaction():
            kept = self.samples.compact()
            for consumer in self.everyone():
                consumer.compact(kept, self.samples.capacity)
        return blocks

    # Capacity.

    def has_room(self, rows: int, size_bytes: int) -> bool:
        """Whether a put of new samples fits. Never over the limits, not even by one put."""
        policy = self.policy
        if policy.HasField("capacity_samples") and self.samples.live + rows > policy.capacity_samples:
            return False
        return not policy.HasField("capacity_bytes") or self.size_bytes + size_bytes <= policy.capacity_bytes

    def check_fits_empty(self, rows: int, size_bytes: int) -> None:
        """Raises InvalidArgument for a put that the limits rule out even when the partition is empty."""
        policy = self.policy
        if policy.HasField("capacity_samples") and rows > policy.capacity_samples:
            raise InvalidArgument(f"{self}: a put of {rows} samples, but capacity_samples is {policy.capacity_samples}")
        if policy.HasField("capacity_bytes") and size_bytes > policy.capacity_bytes:
            raise InvalidArgument(f"{self}: a put of {size_bytes} bytes, but capacity_bytes is {policy.capacity_bytes}")

    # Descriptions.

    def fields(self, names: Iterable[str] | None = None) -> list[controller_pb2.Field]:
        """Returns fields as they cross the wire; all of them, in the order of their first put, when none are named."""
        columns = self.samples.columns
        return [
            controller_pb2.Field(name=name, form=columns[name].form_bytes, written=columns[name].written)
            for name in (columns if names is None else names)
        ]

    def consumer_counts(self, consumer: Consumer) -> controller_pb2.ConsumerCounts:
        """Returns a consumer's counts; pending and ready by the fields of its latest claim, else by all fields."""
        view = self.view(consumer, consumer.last_fields or ())
        counts = consumer.counts
        return controller_pb2.ConsumerCounts(
            name=consumer.name,
            pending=consumer.pending(view),
            ready=view.count,
            leased=int(counts[LEASED]),
            consumed=int(counts[CONSUMED]),
            dropped=int(counts[DEAD] + counts[STALE]),
        )

    def describe(self) -> controller_pb2.Partition:
        """Returns the partition as it crosses the wire."""
        return controller_pb2.Partition(
            partition_id=self.partition_id,
            name=self.name,
            policy=self.policy,
            sealed=self.sealed,
            version=self.version,
            samples=self.samples.live,
            bytes=self.size_bytes,
            fields=self.fields(),
            consumers=[self.consumer_counts(consumer) for consumer in self.consumers.values()],
            metadata=self.metadata,
        )


def _listing(values: list[Any], shown: int = 8) -> str:
    more = f", and {len(values) - shown} more" if len(values) > shown else ""
    return ", ".join(map(str, values[:shown])) + more
