"""One partition: its policies, its samples and its consumers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument, SampleNotFound
from tqclient.wire.v1 import controller_pb2
from tqserver.controller.core.arrays import distinct
from tqserver.controller.core.changes import Changes, removed
from tqserver.controller.core.consumer import CONSUMED, DEAD, LEASED, OPEN, STALE, SURPLUS, Consumer
from tqserver.controller.core.effects import ReadinessChanged
from tqserver.controller.core.permits import Admitted
from tqserver.controller.core.samples import SampleTable, Slots
from tqserver.controller.core.tags import UNABORTED
from tqserver.controller.core.versions import LiveVersions
from tqserver.controller.core.view import View, ViewKey

NO_GROUPS: Final = np.empty(0, dtype=np.int64)


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
        admitted: what was put, delivered, and is running.
        shards: metadata of each shard, opaque to the controller.
        producers: live sessions that are registered as producers.
        producers_died: every producer is gone, and the last of them died; of a sealed partition: after that.
        changes: what changed lately; volatile.
        final: its last description, once it is retired; its samples are gone.
        live_versions: weight versions of live samples; None: no policy asks for them.
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
        self.changes = Changes(0)
        self.consumers: dict[str, Consumer] = {}
        self.admitted = Admitted()
        self.shards: dict[int, dict[str, bytes]] = {}
        self.producers: dict[int, None] = {}
        self.producers_died = False
        self.final: controller_pb2.Partition | None = None
        self.live_versions = LiveVersions(self.samples) if policy.HasField("capacity_versions") else None
        # What anybody sees who was granted nothing yet: whatever their names, it is the same. A cache.
        self._newcomer: Consumer | None = None

    def __str__(self) -> str:
        return f"partition {self.name!r}"

    @property
    def retired(self) -> bool:
        """Whether every named consumer was done with it, and its samples are gone."""
        return self.final is not None

    def gone_note(self) -> str:
        """Returns why samples are missing, to end a message with; empty when nothing in particular is known."""
        if not self.retired:
            return ""
        return "; it is retired: every consumer was done with it. create_partition(..., keep=True) keeps samples"

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
        consumer = self.consumers.get(name) or self._newcomer
        if consumer is None:
            consumer = self._newcomer = self.fresh("")
        return consumer

    def admit(self, name: str) -> Consumer:
        """Returns a consumer, and from here on it is one of the partition's."""
        consumer = self.consumers.get(name)
        if consumer is None:
            consumer = self._newcomer or self.fresh(name)
            # Others may wait with other choices of samples: what they look at is not made anew.
            self._newcomer = consumer.twin() if len(consumer.views) > 1 else None
            consumer.name = name
            self.consumers[name] = consumer
            consumer.changes = self.changes
        return consumer

    def fresh(self, name: str) -> Consumer:
        """Returns the progress of one who comes now: every live sample is open, or stale."""
        consumer = Consumer(name, self.samples.capacity, self.samples)
        used = slice(0, self.samples.size)
        consumer.begin(self.samples.alive[used], self.stale(used))
        return consumer

    def everyone(self) -> Iterator[Consumer]:
        """All whose progress is tracked, with those that were granted nothing yet."""
        return chain(self.consumers.values(), self.waiting())

    def fields_of(self, fields: Iterable[str]) -> tuple[str, ...]:
        """Returns a field set as views know it: sorted, and all of the partition's when none is named."""
        return tuple(sorted(fields)) or tuple(sorted(self.samples.columns))

    def view(self, consumer: Consumer, fields: Iterable[str], where: bytes = b"", *, unaborted: bool = False) -> View:
        """Returns a consumer's view over a field set and a choice of tags."""
        return consumer.view(ViewKey(self.fields_of(fields), where, unaborted), self.samples.size)

    def waiting(self) -> Iterator[Consumer]:
        """Of `everyone`, the one that stands for all who were granted nothing yet, if somebody asked."""
        return iter(() if self._newcomer is None else (self._newcomer,))

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
                f"{self}: {len(missing)} of {len(ids)} samples do not exist or were cleared: {_listing(listed)}"
                f"{self.gone_note()}",
                ids=listed,
                rows=missing[: wire_limits.ERROR_IDS_MAX].tolist(),
            )
        return slots

    def stale(self, slots: Any) -> NDArray[np.bool_]:
        """Returns which samples max_staleness rules out: their oldest weights are too far behind the version."""
        oldest = self.samples.version_min[slots]
        if not self._drops_stale:
            return np.zeros(len(oldest), dtype=np.bool_)
        stale: NDArray[np.bool_] = (oldest >= 0) & (self.version - oldest > self.policy.max_staleness)
        return stale

    @property
    def _drops_stale(self) -> bool:
        return self.policy.HasField("max_staleness") and self.policy.staleness == "drop"

    def drop_late(self, slots: Slots) -> None:
        """Samples that join a group which was granted to a consumer already are surplus to it.

        Those that it has leased come back to it if it does not consume them, and those that are dead can be requeued.

        Args:
            slots: int64 [n]: samples that are in another group now than before, or new.
        """
        for consumer in self.consumers.values():
            if not consumer.granted_groups:
                continue
            groups = self.samples.group[slots]
            late = [g for g in distinct(groups[groups >= 0]).tolist() if self._was_granted(consumer, g)]
            states = consumer.state[slots]
            unsettled = (states == OPEN) | (states == STALE)  # a newer version would bring back a stale one
            consumer.move(slots[np.isin(groups, late) & unsettled], SURPLUS)

    def _was_granted(self, consumer: Consumer, group: int) -> bool:
        return self.samples.groups.values[group] in consumer.granted_groups

    def give_up(self, consumer: Consumer, slots: Slots) -> Slots:
        """Drops, of samples that a consumer did not consume, those delivered too often; returns the others."""
        spent = consumer.attempts[slots] >= self.policy.max_attempts
        consumer.move(slots[spent], DEAD)
        kept: Slots = slots[~spent]
        return kept

    def give_back(self, consumer: Consumer, slots: Slots) -> Slots:
        """Drops, of samples that a consumer did not consume, those that are stale now; returns the others.

        A group that was granted whole is dropped whole.
        """
        stale = self.stale(slots)
        if consumer.granted_groups:
            groups = self.samples.group[slots]
            stale |= np.isin(groups, groups[stale & (groups >= 0)])
        consumer.move(slots[stale], STALE)
        self.drop_broken_groups(consumer, slots[stale])
        kept: Slots = slots[~stale]
        return kept

    def reopen(self, consumer: Consumer, slots: Slots) -> None:
        """Makes samples unconsumed for a consumer: open, or dropped where they are stale."""
        stale = self.stale(slots)
        consumer.move(slots[stale], STALE)
        consumer.move(slots[~stale], OPEN)
        self.drop_broken_groups(consumer, slots)

    def reserve(self, rows: int) -> None:
        """Makes room for more samples."""
        if self.samples.reserve(rows):
            for consumer in self.everyone():
                consumer.resize(self.samples.capacity)

    def apply_staleness(self, slots: Slots, left: NDArray[np.int64] = NO_GROUPS) -> None:
        """Drops the open samples that are stale now, and takes back those that an upsert made fresh again.

        So whether an unsettled sample is dropped follows from its versions alone, for consumers that come later too;
        and for a consumer of whole groups, from those of its group. `left`: groups that some of the samples were in.
        """
        if not self._drops_stale:
            return
        stale = self.stale(slots)
        for consumer in self.everyone():
            states = consumer.state[slots]
            consumer.move(slots[stale & (states == OPEN)], STALE)
            if not consumer.granted_groups:
                consumer.move(slots[~stale & (states == STALE)], OPEN)
            self.drop_broken_groups(consumer, slots, left)

    def drop_broken_groups(self, consumer: Consumer, slots: Slots, left: NDArray[np.int64] = NO_GROUPS) -> None:
        """A stale member takes its group with it, for a consumer that was ever granted a group whole.

        All unsettled members of the groups of these samples are dropped while one of them, not counting aborted ones,
        is stale; and are open otherwise.

        Args:
            consumer: any.
            slots: int64 [n]: samples that became stale, or fresh, or joined a group.
            left: int64 [n]: groups that some of them were in before.
        """
        if not (consumer.granted_groups and consumer.counts[STALE]):
            return
        samples = self.samples
        if len(slots) != samples.live or not samples.alive[slots].all():
            touched = distinct(np.append(samples.group[slots], left))
            slots = np.append(slots[samples.group[slots] < 0], samples.members(touched[touched >= 0]))
        slots = slots[(consumer.state[slots] == OPEN) | (consumer.state[slots] == STALE)]
        stale, groups = self.stale(slots), samples.group[slots]
        breaking = stale & (groups >= 0)
        breaking[breaking] = samples.matching(UNABORTED, slots[breaking])
        dropped = stale | np.isin(groups, groups[breaking])
        states = consumer.state[slots]
        consumer.move(slots[dropped & (states == OPEN)], STALE)
        consumer.move(slots[~dropped & (states == STALE)], OPEN)

    def remove(self, slots: Slots) -> NDArray[np.uint64]:
        """Removes samples, each named once; returns one block id per field that they had."""
        self._take_back(slots)
        self.changes.add(*removed(self.samples, slots))
        blocks = self.samples.remove(slots)
        for consumer in self.everyone():
            consumer.vacate(slots)
            self.drop_broken_groups(consumer, slots)
        if self.samples.wants_compaction():
            kept = self.samples.compact()
            for consumer in self.everyone():
                consumer.compact(kept, self.samples.capacity)
        return blocks

    def compact_groups(self) -> None:
        """Forgets the groups that all samples left, once they are many."""
        if self.samples.wants_group_compaction():
            self.samples.compact_groups()
            for consumer in self.everyone():
                consumer.forget_groups()

    def give_up_room(self) -> None:
        """It is retired: nothing will ever lie in its slots again."""
        self._newcomer = None
        kept = self.samples.compact(capacity=1)
        for consumer in self.consumers.values():
            consumer.views.clear()
            consumer.granted_groups.clear()
            consumer.compact(kept, self.samples.capacity)

    def _take_back(self, slots: Slots) -> None:
        """Samples go; those that nobody consumes do not count as accepted any more."""
        if self.live_versions is not None:
            self.live_versions.discard(slots)
        if not self.consumers:  # whoever reads them is none, and is not counted
            return
        used = np.zeros(len(slots), dtype=np.bool_)
        for consumer in self.consumers.values():
            used |= (consumer.state[slots] == LEASED) | (consumer.state[slots] == CONSUMED)
        self.admitted.accepted -= int(np.count_nonzero(~used))

    def count_delivered(self, consumer: Consumer, slots: Slots, sign: int = 1) -> None:
        """Samples are granted to a consumer, or taken back (-1); those that it was given before do not count."""
        self.admitted.delivered += sign * (len(slots) - int(np.count_nonzero(consumer.attempts[slots])))

    def rows_changed(self) -> ReadinessChanged:
        """Returns what says that samples became ready, or are so no longer. The last ones may be the end of a claim."""
        return ReadinessChanged(self.partition_id, by_count=not self.sealed)

    # Capacity.

    def check_fits_empty(self, rows: int, size_bytes: int) -> None:
        """Raises InvalidArgument for a put that the limits rule out even when the partition is empty."""
        policy = self.policy
        if policy.HasField("capacity_samples") and rows > policy.capacity_samples:
            raise InvalidArgument(f"{self}: a put of {rows} samples, but capacity_samples is {policy.capacity_samples}")
        if policy.HasField("capacity_bytes") and size_bytes > policy.capacity_bytes:
            raise InvalidArgument(f"{self}: a put of {size_bytes} bytes, but capacity_bytes is {policy.capacity_bytes}")

    # Descriptions.

    def write_fields(self, fields: Any, names: Iterable[str] | None = None) -> None:
        """Writes down fields as they cross the wire.

        Args:
            fields: the list of a message: one that is put into it later is copied.
            names: None: all of them, in the order of their first put.
        """
        columns = self.samples.columns
        for name in columns if names is None else names:
            column = columns[name]
            field = fields.add(name=name, form=column.form_bytes, written=column.written)
            found = self.samples.length_range(name)
            if found is not None:
                field.length_min, field.length_max = found

    def _shards(self) -> dict[int, controller_pb2.Shard]:
        counts = self.samples.shards.sizes
        return {
            shard: controller_pb2.Shard(metadata=self.shards.get(shard, {}), samples=counts.get(shard, 0))
            for shard in sorted({*self.shards, *counts})
        }

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
            dropped=int(counts[DEAD] + counts[STALE] + counts[SURPLUS]),
        )

    def describe(self) -> controller_pb2.Partition:
        """Returns the partition as it crosses the wire; a retired one with its last counts."""
        if self.final is None:
            return self._describe()
        final = controller_pb2.Partition()
        final.CopyFrom(self.final)
        final.version, final.producers, final.running = self.version, len(self.producers), self.admitted.running
        final.metadata.clear()
        final.metadata.update(self.metadata)
        for shard in final.shards.values():
            shard.metadata.clear()
        for number, values in self.shards.items():
            final.shards[number].metadata.update(values)
        return final

    def _describe(self) -> controller_pb2.Partition:
        described = controller_pb2.Partition(
            partition_id=self.partition_id,
            name=self.name,
            policy=self.policy,
            sealed=self.sealed,
            version=self.version,
            samples=self.samples.live,
            bytes=self.size_bytes,
            consumers=[self.consumer_counts(consumer) for consumer in self.consumers.values()],
            metadata=self.metadata,
            accepted=self.admitted.accepted,
            running=self.admitted.running,
            inserted=self.admitted.inserted,
            delivered=self.admitted.delivered,
            shards=self._shards(),
            producers=len(self.producers),
        )
        self.write_fields(described.fields)
        return described


def partition_changed(partition: Partition) -> controller_pb2.Change:
    """Returns what watchers are told of a partition that was sealed, retired, or has another version or metadata."""
    changed = controller_pb2.Change.PartitionChanged(partition=partition.describe())
    return controller_pb2.Change(partition=changed)


def _listing(values: list[Any], shown: int = 8) -> str:
    more = f", and {len(values) - shown} more" if len(values) > shown else ""
    return ", ".join(map(str, values[:shown])) + more
