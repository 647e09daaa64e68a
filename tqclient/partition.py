"""Partitions, as blocking calls."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import Group, RowArguments, Tags, WeightVersion
from tqclient.changes import Change
from tqclient.consumer import Batch, Consumer
from tqclient.errors import InvalidArgument
from tqclient.info import PartitionInfo, PartitionRef
from tqclient.operations import partitions, permits
from tqclient.operations.allocate import allocate
from tqclient.operations.consumers import ConsumerRef
from tqclient.operations.put import put
from tqclient.operations.ranges import Ranges
from tqclient.operations.read import get
from tqclient.operations.watch import Watcher
from tqclient.permit import Permit, PermitData, handle_of
from tqclient.producer import Producer
from tqclient.samplers import Sampler
from tqclient.spec import Spec
from tqclient.topology import Topology
from tqclient.watch import watch
from tqclient.writer import Writer

if TYPE_CHECKING:
    from tqclient.client import Client


class Metadata(MutableMapping[str, Any]):
    """Values of a partition or of a shard; each access is a call, and a value comes back exactly as it went in."""

    def __init__(self, client: Client, ref: PartitionRef, shard: int | None = None) -> None:
        """Made by `Partition.metadata` and `Shard.metadata`."""
        self._client = client
        self._ref = ref
        self._shard = shard

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        if name not in self.to_dict():
            raise KeyError(name)
        self._client._run(partitions.change_metadata(self._client._state, self._ref, {}, [name], self._shard))

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def update(self, values: Any = (), /, **more: Any) -> None:
        """Sets several values at once: a reader sees all of them or none."""
        try:
            chosen = dict(values, **more)
        except (TypeError, ValueError, RuntimeError):  # the last one is torch's
            raise InvalidArgument(f"metadata={values!r:.80}: expected a mapping, or pairs of name and value") from None
        self._client._run(partitions.change_metadata(self._client._state, self._ref, chosen, (), self._shard))

    def to_dict(self) -> dict[str, Any]:
        """Returns all values, taken at one instant."""
        return self._client._run(partitions.get_metadata(self._client._state, self._ref, self._shard))

    def __repr__(self) -> str:
        shard = "" if self._shard is None else f"shard {self._shard} of "
        return f"<Metadata of {shard}partition {self._ref.name!r}>"


class Shard:
    """The part of a partition that is meant for one DP rank: the samples whose tag `shard` is its number."""

    def __init__(self, client: Client, ref: PartitionRef, shard: int) -> None:
        """Made by `Partition.shard`."""
        self._client = client
        self._ref = ref
        self._shard = shard

    @property
    def metadata(self) -> Metadata:
        """The shard's own values, as a mapping."""
        return Metadata(self._client, self._ref, self._shard)

    def __repr__(self) -> str:
        return f"<Shard {self._shard} of partition {self._ref.name!r}>"


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

    def shard(self, shard: int) -> Shard:
        """Returns a part of the partition, by number; makes no call."""
        return Shard(self._client, self._ref, partitions.shard_of(shard))

    def producer(self) -> Producer:
        """Registers this client as one that makes samples, as a context manager.

            with part.producer():
                part.put(generate(prompts))

        Once every producer is gone, and the last of them died without leaving the block or closing its client, claims
        that would wait raise `ProducersGone`, until another one registers or the partition is sealed; if it dies after
        that, claims that wait for a field do. A client whose session was lost registers again by itself.
        """
        return Producer(self._client, self._ref)

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
        permit: PermitData | None = None,
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
            permit: that the new samples are taken from; without `weight_version`, they have the version of the permit:
                the one current when their generation began.
            timeout: seconds; the put waits that long while the partition is over its limits.

        Returns:
            Ids of the samples, int64 `[rows]`.

        Raises:
            UnsupportedValue: a value cannot be carried exactly; nothing was written.
            SchemaMismatch: a column does not fit its field; nothing was written.
            DuplicateKey: a key exists with other bytes, or a field was written before; the first value is intact.
            SampleNotFound: one of `ids` does not exist.
            Sealed: the partition takes no more samples.
            BackpressureTimeout: it stayed over its limits; says over which.
            LeaseExpired: the permit ended with its session; put without it, and the samples are admitted as they come.
            StorageFull: no storage node has room.
            Unavailable: a daemon was away until the deadline. It may have put all the same: only one with keys can be
                given again without putting twice.
        """
        arguments = RowArguments(ids, keys, groups, weight_version, tags, upsert)
        return self._client._run(put(self._state, self._ref, values, arguments, timeout, handle_of(permit)))

    def allocate(
        self,
        rows: int,
        spec: Spec,
        *,
        keys: Sequence[str | None] | None = None,
        groups: Sequence[Group | None] | None = None,
        weight_version: WeightVersion | None = None,
        tags: Tags | Sequence[Tags] | None = None,
        timeout: float | None = None,
    ) -> Writer:
        """Makes room for new samples, to be filled in where they will lie.

            shapes = [[patches, 1176] for patches in counts]
            with part.allocate(64, {"tokens": ("int64", [2048]), "pixels": ("float32", shapes)}) as writer:
                for row, image in zip(writer["pixels"], images, strict=True):
                    row.copy_(image)  # from a device as well
                writer["tokens"].copy_(tokens)
                ids = writer.commit()

        On the host of the arena the tensors are the arena's own memory, and nothing is copied by the commit, which
        hashes them and publishes them. Elsewhere, and in a partition with replicas, they are memory of this process,
        and the commit copies them.

        Args:
            rows: how many samples, at least 1.
            spec: by field, `(dtype, shape)`, where all rows have that shape; `(dtype, shapes)`, with one shape for each
                row, which may differ in its first dimension; or a mapping of the same, for a struct.
            keys: see `put`.
            groups: see `put`.
            weight_version: see `put`.
            tags: see `put`.
            timeout: seconds, to find room in.

        Returns:
            The writer. Leaving it as a context manager without a commit gives the room back, and so does forgetting it.

        Raises:
            InvalidArgument: the spec does not say what it must, or the rows are more than one block (1 GiB).
            SchemaMismatch: a field is of another kind in this partition.
            StorageFull: no node has room.
        """
        arguments = RowArguments(None, keys, groups, weight_version, tags)
        operation = allocate(self._state, self._ref, rows, spec, arguments, timeout)
        return Writer(self._client, self._client._run(operation))

    def permit(self, samples: int, *, timeout: float | None = None) -> Permit:
        """Waits until the partition admits samples that are about to be generated.

            with part.permit(8, timeout=60) as permit:
                part.put(generate(prompt, permit.version), permit=permit)

        Under `staleness="wait"`, samples on permits count as running, and the partition admits no more than its trainer
        can consume in time. Permits and puts without one wait in one line, in the order in which they came. Otherwise
        the permit is granted at once; it still says which version the generation began with.

        Args:
            samples: to be put under it, by one put or several.
            timeout: seconds.

        Returns:
            The permit. Leaving it as a context manager returns what was not put; so does the end of this client's
            session.

        Raises:
            BackpressureTimeout: there was no room in time; says why.
            Sealed: the partition takes no more samples.
        """
        return Permit(self._client, self._client._run(permits.acquire(self._state, self._ref, samples, timeout)))

    def get(
        self,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        keys: Sequence[str] | None = None,
        fields: Sequence[str] | None = None,
        ranges: Ranges | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Batch:
        """Reads samples by id or by key, in the order asked for.

        Args:
            ids: of samples; or
            keys: of samples.
            fields: to read; None reads every field of the partition.
            ranges: by field, or by the path of a child of a struct (`mm.pixels`): which rows of the leading dimension
                to read: `(start, stop)` for all samples, one such pair per sample, or a function that is given the
                lengths, int64 [rows], and returns the pairs. A stop of None is the sample's end; one beyond it is an
                error. Only these rows are fetched. A dense column stays dense with one pair for all samples, and
                becomes jagged otherwise.
            copy: False gives views where the path allows them: good until the batch is closed or collected as garbage.
                Never write to one: a store to a tensor that is a view ends the process (SIGSEGV); arrays raise.
            timeout: seconds.

        Raises:
            SampleNotFound: names every id, key or field that is missing.
            InvalidArgument: a range reaches beyond its sample; names the sample and its length.
            CorruptBlock: stored bytes fail their checksums; names field, row and sample.
        """
        operation = get(self._state, self._ref, ids, keys, fields, copy, timeout, ranges)
        return Batch(self._client, self._client._run(operation))

    def consumer(
        self,
        name: str,
        *,
        fields: Sequence[str] | None = None,
        sampler: Sampler | None = None,
        topology: Topology | None = None,
        where: Tags | None = None,
        token_field: str | None = None,
    ) -> Consumer:
        """Returns a cursor over the partition; makes no call.

        Args:
            name: of the consumer. Those that share it share its progress; others are not disturbed.
            fields: that a sample must have to be ready, and that are read; None means every field that the partition
                has when a claim is granted.
            sampler: how samples are picked; None is `Fifo()`.
            topology: place of this process in a training job: all members of one DP rank get the same batches.
            where: tags that a sample must have, all of them, to be this consumer's; looked at by the controller.
            token_field: field whose lengths `claim(max_tokens=...)` counts, or `images.pixels` for a child of a struct;
                None is that of `SeqlenBalanced`, if that is the sampler.
        """
        ref = ConsumerRef.from_arguments(
            self._ref,
            name,
            fields=fields,
            sampler=sampler,
            topology=topology,
            where=where,
            token_field=token_field,
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

    def watch(self, from_seq: int = 0, timeout: float | None = None) -> Generator[Change, None, None]:
        """Follows what changes in the partition: nobody needs to list it in a loop.

            for change in part.watch():
                match change:
                    case tq.Listed(first=True): ...  # forget what you knew: what is live comes, until `complete`
                    case tq.Written(added=True): ...

        Every change after `from_seq` comes once and in order, also when the connection breaks or the controller is
        restarted meanwhile. Where the controller does not remember that far back, a listing of all that is live comes
        instead of what was missed; one that is interrupted begins again, with `first`. A watcher that does not keep up
        delays nobody, and gets such a listing.

        Args:
            from_seq: the `sequence` of a change with `last`, from an earlier watch; 0 begins with a listing.
            timeout: seconds to wait for the next change: when none came, the iterator ends. None waits for ever,
                for a controller that is away, too.

        Yields:
            `Listed`, `Written`, `Removed`, `Tagged`, `Settled` or `Changed`. The watch begins when the
            first one is asked for, and closing the iterator ends it.

        Raises:
            PartitionNotFound: it was deleted.
            Unavailable: the controller is away, and no change came within the timeout.
        """
        return watch(self._client, Watcher(self._state, self._ref, from_seq, timeout))

    def __repr__(self) -> str:
        return f"<Partition {self.name!r}>"
