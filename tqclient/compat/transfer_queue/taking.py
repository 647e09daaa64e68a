"""Taking batches for a task: claimed, recorded and consumed in one go, as callers of `get_meta` expect.

The records say which samples a task was given, and let every rank of one number find the batch that another one of
them was given before. They are samples of a partition of their own, under keys that cannot be put twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar
from uuid import uuid4

import torch

from tqclient.client import Client
from tqclient.compat.transfer_queue import lookup
from tqclient.compat.transfer_queue.config import INTERNAL
from tqclient.compat.transfer_queue.lookup import Claimed, Rows
from tqclient.compat.transfer_queue.samplers import BaseSampler
from tqclient.consumer import Consumer
from tqclient.errors import ClaimTimeout, DuplicateKey, InvalidArgument, PartitionNotFound, SampleNotFound, Sealed
from tqclient.partition import Partition

LOOK_FIRST: Final = 0.05
"""Seconds until the first look whether another rank of the number was given the batch that this one waits for; ..."""
WAIT_MAX: Final = 1.0
"""... and between later ones. So long does a call go on after its client was closed, or its caller gave up."""

T = TypeVar("T")

_given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)


class GivenUp(Exception):
    """The caller does not wait for the batch any more. Nothing was taken."""


def unless(given_up: threading.Event, call: Callable[[], T]) -> T:
    """Calls, in a thread of its own; what it has `take` wait for is not taken once the event is set."""
    token = _given_up.set(given_up)
    try:
        return call()
    finally:
        _given_up.reset(token)


def _check_wanted() -> None:
    given_up = _given_up.get()
    if given_up is not None and given_up.is_set():
        raise GivenUp


@dataclass(frozen=True, slots=True)
class Slot:
    """Which batch a rank asks for."""

    dp_rank: int
    batch_index: int


def slot_of(sampler: BaseSampler, config: dict[str, object]) -> Slot | None:
    """Returns the batch that a `sampling_config` names; None where each call takes a batch of its own.

    Raises:
        InvalidArgument: the sampler goes by ranks, and the configuration does not say which.
    """
    if not sampler.ranked:
        return None
    rank, index = config.get("dp_rank"), config.get("batch_index")
    needed = type(sampler).__name__ in ("RankAwareSampler", "SeqlenBalancedSampler")
    if rank is None and not needed:
        return None
    for what, value in (("dp_rank", rank), ("batch_index", index)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument(
                f"{type(sampler).__name__}: sampling_config[{what!r}]={value!r}: expected an int, 0 or more"
            )
    if rank >= sampler.dp_size > 1:  # type: ignore[operator]
        raise InvalidArgument(f"{type(sampler).__name__}: dp_rank={rank}, but dp_size={sampler.dp_size}")
    return Slot(rank, index)  # type: ignore[arg-type]


class Ledger:
    """The records of one partition.

    Args:
        client: of the service.
        part: whose samples are taken. A partition that is made anew under the name has other records.
    """

    def __init__(self, client: Client, part: Partition) -> None:
        self._client = client
        self._name = f"{INTERNAL}taken/{part._ref.partition_id}"
        self._part: Partition | None = None

    def find(self, task: str, slot: Slot) -> list[int] | None:
        """Returns the ids of a rank's batch; None when nobody was given it yet."""
        part = self._find()
        if part is None:
            return None
        try:
            batch = part.get(keys=[_key(task, slot)], fields=["ids"])
        except SampleNotFound:
            return None
        return [int(each) for each in batch.list("ids")[0]]

    def record(self, task: str, shares: Sequence[tuple[Slot | None, Sequence[int]]]) -> None:
        """Records who is given what, all at once.

        Raises:
            DuplicateKey: one of them was given another batch.
        """
        self._part = self._find() or self._client.create_partition(self._name, exist_ok=True)
        self._part.put(
            {"ids": [torch.tensor(ids, dtype=torch.int64) for _, ids in shares]},
            keys=[_key(task, slot) for slot, _ in shares],
            tags={"task": task},
        )

    def taken(self, task: str) -> set[int]:
        """Returns the ids of all samples that a task was given."""
        part = self._find()
        if part is None:
            return set()
        rows = lookup.listing(part)
        own = [id_ for id_, tags in zip(rows.ids, rows.tags, strict=True) if tags["task"] == task]
        return {int(each) for ids in part.get(own, fields=["ids"]).list("ids") for each in ids} if own else set()

    def forget(self, task: str) -> None:
        """Removes the records of a task."""
        part = self._find()
        if part is not None:
            part.clear(tags={"task": task})

    def drop(self) -> None:
        """Removes all records."""
        with suppress(PartitionNotFound):
            self._client.delete_partition(self._name)
        self._part = None

    def _find(self) -> Partition | None:
        if self._part is None:
            try:
                self._part = self._client.partition(self._name)
            except PartitionNotFound:
                return None
        return self._part


def _key(task: str, slot: Slot | None) -> str:
    return f"{task}/{uuid4().hex}" if slot is None else f"{task}/{slot.dp_rank}/{slot.batch_index}"


def take(
    consumer: Consumer, part: Partition, ledger: Ledger, sampler: BaseSampler, slot: Slot | None, size: int, wait: float
) -> Rows:
    """Takes a batch for the consumer's task.

    A process that is killed within leaves the batch to be taken again. Between the record and the acknowledgement, that
    is for one rank what another one has by its record: given twice, never lost.

    Args:
        consumer: named like the task.
        part: that it takes from.
        ledger: of the partition.
        sampler: how samples are picked.
        slot: which batch; None takes the next one.
        size: samples for this caller.
        wait: seconds.

    Raises:
        ClaimTimeout: there were too few samples.
        InvalidArgument: the batch cannot be divided over the ranks; it was given back.
        GivenUp: the caller does not wait any more.
    """
    if size % sampler.group_size:
        raise InvalidArgument(f"batch_size={size} is no multiple of n_samples_per_prompt={sampler.group_size}")
    end = time.monotonic() + wait
    look = WAIT_MAX if slot is None else LOOK_FIRST
    while True:
        _check_wanted()
        ids = None if slot is None else ledger.find(consumer.name, slot)
        if ids is not None:
            return lookup.locate(part, consumer._ref.fields, ids=_some(ids, consumer))
        left = end - time.monotonic()
        try:
            claimed = Claimed(consumer, size if slot is None else size * sampler.dp_size, max(0.0, min(look, left)))
        except ClaimTimeout:
            if left <= look:
                raise
            look = min(2 * look, WAIT_MAX)
            continue
        except Sealed:
            if slot is None or ledger.find(consumer.name, slot) is None:
                raise
            continue  # another rank of this number was given the last batch meanwhile
        if slot is None:
            _consume(claimed, ledger, consumer.name, [(None, claimed.rows.ids)])
            return claimed.rows
        try:
            shares = _shares(claimed.rows, sampler, slot)
        except BaseException:
            claimed.abandon()
            raise
        try:
            _consume(claimed, ledger, consumer.name, [(other, claimed.rows.select(rows).ids) for other, rows in shares])
        except DuplicateKey:
            continue  # another rank was faster
        return claimed.rows.select(_some(dict(shares)[slot], consumer))


def _shares(rows: Rows, sampler: BaseSampler, slot: Slot) -> list[tuple[Slot, list[int]]]:
    """Returns which rows each rank is given by a batch that one of them claimed."""
    ranks = range(sampler.dp_size) if sampler.dp_size > 1 else [slot.dp_rank]
    return [(Slot(rank, slot.batch_index), own) for rank, own in zip(ranks, sampler.divide(rows.tags), strict=True)]


def _some(rows: list[int], consumer: Consumer) -> list[int]:
    """Raises Sealed when the last, short batch of a sealed partition left nothing for this rank."""
    if not rows:
        raise Sealed(f"{consumer.name}: nothing is left for this rank")
    return rows


def _consume(claimed: Claimed, ledger: Ledger, task: str, shares: Sequence[tuple[Slot | None, Sequence[int]]]) -> None:
    try:
        _check_wanted()
        ledger.record(task, shares)
    except (DuplicateKey, GivenUp):
        claimed.release()
        raise
    except BaseException:
        claimed.abandon()
        raise
    claimed.ack()
