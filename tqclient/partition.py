"""Partitions, as blocking calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import Group, RowArguments, Tags, WeightVersion
from tqclient.consumer import Batch, Consumer
from tqclient.info import PartitionInfo, PartitionRef
from tqclient.operations import partitions
from tqclient.operations.claims import ConsumerRef
from tqclient.operations.put import put
from tqclient.operations.read import check_supported, get
from tqclient.samplers import Sampler

if TYPE_CHECKING:
    from tqclient.client import Client


class Metadata(MutableMapping[str, Any]):
    """Partition-level values; each access is a call, and a value comes back exactly as it went in."""

    def __init__(self, client: Client, ref: PartitionRef) -> None:
        """Made by `Partition.metadata`."""
        self._client = client
        self._ref = ref

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        if name not in self.to_dict():
            raise KeyError(name)
        self._client._run(partitions.change_metadata(self._client._state, self._ref, {}, [name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def update(self, values: Any = (), /, **more: Any) -> None:
        """Sets several values at once: a reader sees all of them or none."""
        self._client._run(partitions.change_metadata(self._client._state, self._ref, {**dict(values), **more}))

    def to_dict(self) -> dict[str, Any]:
        """Returns all values, taken at one instant."""
        return self._client._run(partitions.get_metadata(self._client._state, self._ref))

    def __repr__(self) -> str:
        return f"<Metadata of partition {self._ref.name!r}>"


class Partition:
    """A set of samples. Its methods may be called from many threads at once."""

    def __init__(self, client: Client, ref: PartitionRef) -> None:
        """Made by `Client.partition` and `Client.create_partition`."""
        self._client = client
        self._state = client._state
        self._ref = ref

    @property
    def name(self) -> str:
        """Name of the partition."""
        return self._ref.name

    @property
    def metadata(self) -> Metadata:
        """Partition-level values, as a mapping."""
        return Metadata(self._client, self._ref)

    def put(
        self,
        values: Any,
        *,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
        keys: Sequence[str | None] | None = None,
        groups: Sequence[Group | None] | None = None,
        weight_version: WeightVersion | None = None,
        tags: Tags | Sequence[Tags] | None = None,
        upsert: bool = False,
        timeout: float | None = None,
    ) -> NDArray[np.int64]:
        """Puts samples, or adds fields to samples that exist. All of it becomes visible at once, or nothing does.

        A put whose reply was lost is tried again and has one effect. Tensors that require grad are stored detached.

        Args:
            values: a dict of columns, a list of sample dicts, or a TensorDict. No row: nothing happens.
            ids: samples that exist, one per row; None puts new ones.
            keys: of new samples, one per row; None where a row has none.
            groups: str, int or bytes per row, such as the prompt that a sample belongs to; None where it has none.
            weight_version: that made the samples: an int or a tuple (min, max) for all rows, or one per row.
            tags: small values by name: one mapping for all rows, or one per row.
            upsert: replace fields of samples that exist, found by key or id, instead of refusing.
            timeout: seconds; the put waits that long while the partition is over its limits.

        Returns:
            Ids of the samples, int64 `[rows]`.

        Raises:
            UnsupportedValue: a value cannot be carried exactly; nothing was written.
            SchemaMismatch: a column does not fit its field; nothing was written.
            DuplicateKey: a key exists with other bytes, or a field was written before; the first value is intact.
            SampleNotFound: one of `ids` does not exist.
            Sealed: the partition takes no more samples.
            BackpressureTimeout: it stayed over its limits.
            StorageFull: no storage node has room.
            Unavailable: a daemon was away until the deadline. It may have put all the same: only one with keys can be
                given again without putting twice.
        """
        arguments = RowArguments(ids, keys, groups, weight_version, tags, upsert)
        return self._client._run(put(self._state, self._ref, values, arguments, timeout))

    def get(
        self,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        keys: Sequence[str] | None = None,
        fields: Sequence[str] | None = None,
        ranges: Any = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Batch:
        """Reads samples by id or by key, in the order asked for.

        Args:
            ids: of samples; or
            keys: of samples.
            fields: to read; None reads every field of the partition.
            ranges: not supported yet.
            copy: False gives views where the path allows them: good until the batch is closed or collected as garbage.
            timeout: seconds.

        Raises:
            SampleNotFound: names every id, key or field that is missing.
            CorruptBlock: stored bytes fail their checksums; names field, row and sample.
        """
        check_supported(ranges=ranges)
        return Batch(self._client, self._client._run(get(self._state, self._ref, ids, keys, fields, copy, timeout)))

    def consumer(
        self,
        name: str,
        *,
        fields: Sequence[str] | None = None,
        sampler: Sampler | None = None,
        topology: Any = None,
        where: Any = None,
    ) -> Consumer:
        """Returns a cursor over the partition; makes no call.

        Args:
            name: of the consumer. Those that share it share its progress; others are not disturbed.
            fields: that a sample must have to be ready, and that are read; None means every field that the partition
                has when a claim is granted.
            sampler: how samples are picked; None is `Fifo()`.
            topology: not supported yet.
            where: not supported yet.
        """
        ref = ConsumerRef.from_arguments(
            self._ref, name, fields=fields, sampler=sampler, topology=topology, where=where
        )
        return Consumer(self._client, ref)

    def describe(self) -> PartitionInfo:
        """Describes the partition: fields, samples, bytes, and per consumer how many samples are in which state."""
        return self._client._run(partitions.partition_info(self._state, self._ref))

    def set_tags(self, ids: Sequence[int] | NDArray[np.int64], tags: Tags | Sequence[Tags]) -> None:
        """Merges tags into those of samples; None deletes a tag.

        Args:
            ids: of samples.
            tags: one mapping for all of them, or one per id.

        Raises:
            SampleNotFound: one of them does not exist.
        """
        self._client._run(partitions.set_tags(self._state, self._ref, ids, tags))

    def set_version(self, version: int) -> None:
        """Sets the current weight version; samples that `max_staleness` rules out are dropped. It never decreases."""
        self._client._run(partitions.set_version(self._state, self._ref, version))

    def seal(self) -> None:
        """Says that no more samples come: streams over it end instead of waiting. Fields may still be added."""
        self._client._run(partitions.seal(self._state, self._ref))

    def clear(
        self,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        keys: Sequence[str] | None = None,
        groups: Sequence[Group] | None = None,
        tags: Mapping[str, Any] | None = None,
        prefix: str | None = None,
    ) -> NDArray[np.int64]:
        """Removes samples for every consumer; those that are gone already are passed over.

        Args:
            ids: of samples; or
            keys: of samples; or
            groups: every sample of these; or
            tags: every sample that has all of these; or
            prefix: every sample whose key begins with it.

        Returns:
            Ids of what was removed, int64.
        """
        return self._client._run(partitions.clear(self._state, self._ref, ids, keys, groups, tags, prefix))

    def __repr__(self) -> str:
        return f"<Partition {self.name!r}>"
