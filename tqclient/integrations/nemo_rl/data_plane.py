"""The methods that NeMo-RL calls."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar
from uuid import uuid4

from tqclient.client import Client
from tqclient.compat.transfer_queue import tags as any_tags
from tqclient.compat.transfer_queue.errors import StorageKeyNotFoundError
from tqclient.compat.transfer_queue.lookup import Claimed
from tqclient.errors import ClaimTimeout, InvalidArgument
from tqclient.info import PartitionInfo
from tqclient.integrations.keyed import KeyedSamples, checked_names
from tqclient.integrations.nemo_rl.claims import Declaration, group_of, take, take_ready
from tqclient.partition import Partition
from tqclient.samplers import GroupSampler

WRITER: Final = "_writer/"
"""Begins the tag that says which client wrote a sample: `clear_samples(None, ...)` goes by it."""
LENGTH_TAG: Final = "input_lengths"

M = TypeVar("M")


class BatchMeta(Protocol):
    """What is read of NeMo-RL's `KVBatchMeta`."""

    partition_id: str
    sample_ids: list[str]
    fields: list[str] | None


class DataPlane(Generic[M]):
    """A data-plane client for NeMo-RL. Its methods may be called from many threads at once.

    Attributes:
        client: the connection, for what the interface has no name for, such as weights or `Partition.seal`.
    """

    def __init__(self, address: str | None = None, *, batch_meta: Callable[..., M]) -> None:
        """Connects.

        Args:
            address: `host:port` of the controller; None takes TQ_CONTROLLER, then this machine.
            batch_meta: NeMo-RL's `KVBatchMeta`, or what takes the same keywords: `partition_id`, `task_name`,
                `sample_ids`, `fields`, `sequence_lengths` and `tags`.

        Raises:
            ImportError: tensordict is not installed.
            Unavailable: the controller did not answer in time.
        """
        self._batch_meta = batch_meta
        self._samples = KeyedSamples("nemo_rl", address)
        self._written = {WRITER + uuid4().hex: True}

    @property
    def client(self) -> Client:
        """The connection."""
        return self._samples.service

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Makes a partition, or declares anew what is in it. Samples and the tasks' progress stay.

        Args:
            partition_id: of the partition.
            fields: that will be written. More may be; a claim for a field that is in neither is refused.
            num_samples: that are expected; recorded, without effect: nothing is sized by it.
            consumer_tasks: that may claim.
            grpo_group_size: samples of a group: claims get whole groups of so many. Samples whose ids differ in a last
                `_g0`, `_g1`, ... alone are a group. None: claims go by age alone.
            enums: recorded, without effect: strings are carried as they are.

        Raises:
            InvalidArgument: no field or no task was named, or a number is off.
        """
        declared = Declaration(fields, num_samples, consumer_tasks, grpo_group_size, enums)
        declared.check(partition_id)
        self._samples.on(partition_id, lambda part, _: declared.write(part), create=True)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> M:
        """Takes ready samples for a task, the oldest first; the task is not given them again.

        A process that dies within leaves them to be claimed again.

        Args:
            partition_id: where.
            task_name: whose progress counts.
            required_fields: that a sample must have to be ready.
            batch_size: samples.
            dp_rank: reserved by the interface, and without effect here.
            blocking: wait on the server until `batch_size` samples are ready. False takes as many as are ready now, and
                `batch_size` at most: none at all is an empty batch.
            timeout_s: seconds to wait.

        Returns:
            Their ids, tags, and `required_fields`; `sequence_lengths` where each has an int tag `input_lengths`.

        Raises:
            ClaimTimeout: fewer were ready in time; nothing was taken. A TimeoutError.
            StorageKeyNotFoundError: there is no such partition. A KeyError.
            InvalidArgument: the partition was registered without that task, or has no such field, or `timeout_s` is no
                number. A ValueError.
            Sealed: the partition was sealed, and nothing is left.
        """
        checked_names(partition_id, "required_fields", required_fields)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
            raise InvalidArgument(f"claim_meta: partition {partition_id!r}: timeout_s={timeout_s!r}: expected seconds")

        def claim(part: Partition) -> list[Claimed]:
            declared = Declaration.read(part)
            declared.check_tasks(part, [task_name])
            declared.check_fields(part, required_fields)
            size = declared.grpo_group_size
            sampler = None if size is None else GroupSampler(size)
            consumer = part.consumer(task_name, fields=required_fields, sampler=sampler)
            return [take(consumer, batch_size, timeout_s)] if blocking else take_ready(consumer, batch_size, size or 1)

        try:
            claims = self._samples.existing(partition_id, claim)
        except ClaimTimeout as error:
            raise ClaimTimeout(
                f"claim_meta: partition {partition_id!r}: {error.message}, for {timeout_s:g} s; claim fewer, wait "
                "longer, or take what is ready by blocking=False"
            ) from None
        tags = [
            any_tags.decode({name: value for name, value in stored.items() if not name.startswith(WRITER)})
            for claimed in claims
            for stored in claimed.rows.tags
        ]
        lengths = [length for each in tags if (length := _length(each)) is not None]
        return self._batch_meta(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=[key for claimed in claims for key in claimed.rows.keys],
            fields=list(required_fields),
            sequence_lengths=lengths if tags and len(lengths) == len(tags) else None,
            tags=tags,
        )

    def get_data(self, meta: BatchMeta, select_fields: list[str] | None = None) -> Any:
        """Reads the samples of a batch.

        Args:
            meta: of `claim_meta` or `put_samples`, or one made by hand.
            select_fields: to read; None: the batch's fields.

        Returns:
            As `get_samples`.

        Raises:
            InvalidArgument: neither names a field. A ValueError.
            StorageKeyNotFoundError: as `get_samples`.
        """
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise InvalidArgument(
                f"get_data: partition {meta.partition_id!r}: the batch names no fields: give select_fields"
            )
        return self.get_samples(meta.sample_ids, meta.partition_id, list(fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Whether each of the tasks was given every sample that is there; False while there is none.

        Raises:
            StorageKeyNotFoundError: there is no such partition. A KeyError.
            InvalidArgument: no task was named, or the partition was registered without it.
        """
        checked_names(partition_id, "task_names", task_names)

        def look(part: Partition) -> PartitionInfo:
            Declaration.read(part).check_tasks(part, task_names)
            return part.describe()

        info = self._samples.existing(partition_id, look)
        consumed = [info.counts.get(task, {}).get("consumed", 0) for task in task_names]
        return info.samples > 0 and all(count == info.samples for count in consumed)

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: Any = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> M:
        """Puts samples, or fields and tags of samples that exist; these replace what was there.

        All of it becomes visible at once, or nothing does. A task that requires a field may claim the sample from then.

        Args:
            sample_ids: one per row, all different.
            partition_id: where; made when it was not registered.
            fields: a TensorDict `[sample_ids]` of tensors, dense or jagged, and of anything else; None: none. New
                samples then exist without fields.
            tags: merged into the samples' tags, one dict per row; None: none.

        Returns:
            The ids, with the fields and tags of this put. No id: nothing is put.

        Raises:
            InvalidArgument: counts that differ, or an id twice: a ValueError. Nothing was written.
            SchemaMismatch: a field has another dtype or trailing shape than before. Nothing was written.
            UnsupportedValue: a value cannot be carried exactly: a TypeError. Nothing was written.
        """
        given = [{} for _ in sample_ids] if tags is None else [any_tags.encode(each) for each in tags]
        for each in given:
            if any(name.startswith(WRITER) for name in each):
                raise InvalidArgument(f"partition {partition_id!r}: names of tags that begin with {WRITER!r} are taken")
        written = self._samples.put(
            partition_id,
            sample_ids,
            fields,
            groups=[group_of(each) for each in sample_ids],
            tags=[{**each, **self._written} for each in given],
        )
        return self._batch_meta(
            partition_id=partition_id,
            task_name=None,
            sample_ids=list(sample_ids),
            fields=None if fields is None else written,
            sequence_lengths=None,
            tags=None if tags is None else [dict(each) for each in tags],
        )

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> Any:
        """Reads samples by id, in the order asked for. No task's progress changes.

        Args:
            sample_ids: an id may come twice.
            partition_id: where.
            select_fields: to read.

        Returns:
            A TensorDict `[sample_ids]`: a field of tensors is one tensor where the rows read have one shape, and jagged
            otherwise; any other field is a NonTensorStack. No id: an empty one.

        Raises:
            StorageKeyNotFoundError: a sample or its field is not there, or the partition is not; names all of them. A
                KeyError.
            InvalidArgument: no field was named. A ValueError.
        """
        if not sample_ids:
            from tensordict import TensorDict

            return TensorDict({}, batch_size=[0])
        return self._samples.get(partition_id, sample_ids, select_fields)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Removes samples; those that are gone already are passed over.

        Args:
            sample_ids: of the samples; None: all that this client wrote anything of. When there are none of these, it
                warns.
            partition_id: where; one that does not exist has no samples.

        Raises:
            InvalidArgument: `sample_ids` is no list of strings: one string would name samples by its letters.
        """
        if sample_ids:
            checked_names(partition_id, "sample_ids", sample_ids)
            self._samples.clear_in(partition_id, keys=list(sample_ids))
        if sample_ids is not None:
            return
        try:
            removed = len(self._samples.on(partition_id, lambda part, _: part.clear(tags=self._written)))
        except StorageKeyNotFoundError:
            removed = 0
        if not removed:
            warnings.warn(
                f"clear_samples(None, {partition_id!r}) removed nothing: this client wrote none of the samples there; "
                "give their ids",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Ends the connection; samples stay. Repeatable."""
        self._samples.close()


def _length(tags: Mapping[str, Any]) -> int | None:
    """Returns the length that a sample's tags tell; None: they do not, which is no reason to lose a claim's samples."""
    try:
        return operator.index(tags[LENGTH_TAG])
    except (KeyError, TypeError):
        return None
