"""Rollouts from the workers that generate them to the ranks that train on them.

    bridge = connect(RolloutOptions.from_args(args))                                    # flags: add_arguments(parser)
    bridge.publish(rollout_id, batch, dp_size=4, weight_version=7)                      # a rollout worker
    with bridge.fetch(rollout_id, dp_rank, fields=["tokens", "values"]) as rollout:     # a rank of the trainer
        train(rollout["tokens"], rollout["values"], rollout["micro_batch_indices"])

Each rollout is a partition, with the tasks as its consumers. Each DP rank has a shard of it, which it claims whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import tqclient
from tqclient import limits
from tqclient.arguments import names_of, seconds_of
from tqclient.client import Client
from tqclient.consumer import Batch
from tqclient.errors import ClaimTimeout, InternalError, InvalidArgument, PartitionNotFound, Sealed, TopologyMismatch
from tqclient.integrations.rollout import Rollout, mover_to
from tqclient.integrations.rollout_admission import wait_until_finished
from tqclient.integrations.rollout_fields import (
    FIELDS,
    KEY_PREFIX,
    SCHEDULE,
    SCHEDULE_FIELDS,
    SHARD_TAG,
    context_rows,
    convert,
)
from tqclient.integrations.rollout_options import RolloutOptions, add_arguments
from tqclient.operations.ranges import Ranges, wanted_ranges
from tqclient.partition import Partition
from tqclient.topology import Topology

__all__ = ["Rollout", "RolloutBridge", "RolloutOptions", "add_arguments", "connect", "context_rows"]

REMEMBERED: Final = 64
"""Rollouts that are finished and still known as such: whoever publishes one again, or waits for it, finds out."""
FORGOTTEN_TOGETHER: Final = 16


def connect(options: RolloutOptions | None = None, *, topology: Topology | None = None) -> RolloutBridge:
    """Connects to the controller.

    Args:
        options: of the job; None: the defaults.
        topology: as `RolloutBridge` has it.

    Returns:
        A bridge that closes its client with itself; use it as a context manager, or close it.

    Raises:
        InvalidArgument: the device is not there, or no address was given.
        Unavailable: the controller did not answer in time.
    """
    options = options or RolloutOptions()
    client = tqclient.connect(options.controller, transport=options.transport)
    try:
        bridge = RolloutBridge(client, options, topology=topology)
    except BaseException:
        client.close()
        raise
    bridge._owned = client
    return bridge


class Wanted(NamedTuple):
    """A shard, and the fields that make it ready for a task."""

    task: str
    dp_rank: int
    fields: list[str]


class RolloutBridge:
    """One process' end of the bridge: publishes rollouts, or fetches them, or both.

    Args:
        client: connected; stays the caller's.
        options: of the job.
        topology: of a trainer all of whose ranks fetch: each is given the shard of its DP rank, which is consumed once
            all members have acked, or the leader with `leader_acks=True`. None: one process fetches for a DP rank, such
            as the leader that broadcasts to the others.

    Raises:
        InvalidArgument: the device is not there.
    """

    def __init__(
        self, client: Client, options: RolloutOptions | None = None, *, topology: Topology | None = None
    ) -> None:
        self.options = options or RolloutOptions()
        self._client = client
        self._owned: Client | None = None
        self._topology = topology
        self._mover = mover_to(self.options.device)

    def publish(
        self,
        rollout_id: int,
        batch: Mapping[str, Any],
        dp_size: int,
        weight_version: Any = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Puts a whole rollout: trainers see all of it, or nothing. Waits for its turn, as `admit` does.

        Whoever got an error, or died, publishes again: what an earlier try left behind is replaced. One process at a
        time publishes a rollout.

        Args:
            rollout_id: they count up by one, over all workers.
            batch: field → one value per sample; and the schedule fields, of each one value per DP rank.
                `rollout_fields.convert` says which fields there are.
            dp_size: DP ranks that will fetch it.
            weight_version: that generated it: an int or a tuple (min, max); or a list, array or tensor of those, one
                per sample.
            timeout: seconds; None is that of the options.

        Returns:
            True; or False when it had been published, finished or cleaned up before: then nothing has changed.

        Raises:
            InvalidArgument: the batch cannot be trained on; says which field or sample.
            BackpressureTimeout: training did not catch up in time.
            StorageFull: no storage node has room.
        """
        samples = convert(batch, dp_size, self.options.extra_fields, weight_version)
        deadline = self._deadline(timeout)
        self.admit(rollout_id, timeout=_left(deadline))
        part = self._partition(rollout_id)
        if part._ref.sealed:
            return False
        if part._ref.samples:  # with fields that this batch may not have
            self._delete(rollout_id)
            part = self._partition(rollout_id)
        try:
            part.put(
                samples.columns,
                keys=samples.keys,
                tags=samples.tags,
                weight_version=samples.weight_version,
                timeout=_worth(deadline),
            )
        except Sealed:
            return False
        part.seal()
        if rollout_id % FORGOTTEN_TOGETHER == 0:
            # The one that `admit` looks for is among those that are remembered.
            self._forget_finished(rollout_id - REMEMBERED - (self.options.max_staleness or 0))
        return True

    def admit(self, rollout_id: int, *, timeout: float | None = None) -> None:
        """Waits, on the server, until a rollout may be live: until the one `max_staleness + 1` before it is finished.

        `publish` does it, too; before generation, it keeps that from running ahead with old weights.

        Raises:
            BackpressureTimeout: training did not catch up in time; says with which rollout.
        """
        _check_id(rollout_id)
        if self.options.max_staleness is None:
            return
        earlier = rollout_id - self.options.max_staleness - 1
        if earlier >= self.options.start_rollout_id:
            deadline = self._deadline(timeout)
            wait_until_finished(lambda: self._partition(earlier), f"rollout {rollout_id}", _left(deadline))

    def fetch(
        self,
        rollout_id: int,
        dp_rank: int,
        fields: Sequence[str] | None = None,
        task: str = "actor_train",
        *,
        ranges: Ranges | None = None,
        timeout: float | None = None,
    ) -> Rollout:
        """Waits, on the server, for a rollout, and reads the share of one DP rank.

        Until it is acked it is this process': when that dies, whoever asks next gets the same samples again.

        Args:
            rollout_id: of the rollout; it need not be published yet.
            dp_rank: whose share.
            fields: to read; None: all that were published. A field of a rollout that was not published is left out. Any
                other is one that a task writes, as a critic its `values`: the fetch waits for it. The schedule comes
                with every fetch.
            task: on whose behalf; tasks do not disturb each other.
            ranges: as `Partition.get` has them: `{"routed_experts": context_rows(cp_rank, cp_size)}`.
            timeout: seconds; None is that of the options.

        Raises:
            ClaimTimeout: it was not published, or a field not written, in time; or another process holds the share.
            Sealed: the task is done with it, or it was cleaned up.
            InvalidArgument: there is no such task; or a range does not fit, or is of a field that is not fetched.
            TopologyMismatch: the rank is not of this DP rank, or the rollout was cut for another number of them.
        """
        _check_id(rollout_id)
        self._check_place(dp_rank)
        fields = None if fields is None else names_of(fields, what="fields")
        _check_ranges(ranges, fields or [*FIELDS, *self.options.extra_fields])
        known = {*FIELDS, *SCHEDULE_FIELDS, *self.options.extra_fields}
        late = [name for name in fields or () if name not in known]
        facts = {"rollout_id": int(rollout_id), "dp_rank": int(dp_rank)}
        deadline = self._deadline(timeout)
        while True:
            try:
                return self._fetch(self._partition(rollout_id), task, facts, fields, late, ranges, deadline)
            except PartitionNotFound:  # its publisher, or a job that was rewound, makes it anew
                if not _left(deadline):
                    raise

    def _fetch(
        self,
        part: Partition,
        task: str,
        facts: dict[str, Any],
        fields: Sequence[str] | None,
        late: Sequence[str],
        ranges: Ranges | None,
        deadline: float,
    ) -> Rollout:
        published = self._published(part)
        ahead = [name for name in fields or published or () if name in (published or ())]
        whole = published is not None
        wanted = Wanted(task, facts["dp_rank"], [SCHEDULE, *ahead, *late])
        claimed = self._claim(part, wanted, whole, _ranges_of(ranges, [*ahead, *late] if whole else []), deadline)
        try:
            facts = {**facts, **claimed.list(SCHEDULE)[0]}
            self._check_size(facts["dp_size"])
            names = facts["fields"]
            facts["fields"] = [name for name in fields or names if name in names or name in late]
            batch, ids = claimed, _in_order(claimed, facts["schedule"]["partition"])
            if not whole or ids != claimed.ids.tolist():
                read = facts["fields"] or names[:1]
                batch = part.get(ids, fields=read, ranges=_ranges_of(ranges, read), timeout=_worth(deadline))
        except BaseException as error:
            claimed.__exit__(type(error), error, None)
            raise
        return Rollout(batch, facts, self._mover, claimed, part)

    def _published(self, part: Partition) -> list[str] | None:
        """Returns the fields that a rollout was published with, and so can be read by its claim; None: not known yet.

        With a topology all members must claim alike, whether it was published when they came or not.
        """
        if self._topology is not None or not part._ref.sealed:
            return None
        return [name for name in part._ref.fields if name in FIELDS or name in self.options.extra_fields]

    def _claim(self, part: Partition, wanted: Wanted, whole: bool, ranges: Ranges | None, deadline: float) -> Batch:
        """Waits for a shard. Unless it is read as a whole, the claim is looked at for its schedule, keys and ids."""
        consumer = part.consumer(
            wanted.task, fields=wanted.fields, topology=self._topology, where={SHARD_TAG: wanted.dp_rank}
        )
        try:
            return consumer.claim(limits.ROWS_PER_CLAIM_MAX, copy=whole, ranges=ranges, timeout=_left(deadline))
        except (ClaimTimeout, Sealed) as error:
            info = part.describe()
            if info.sealed and info.samples and wanted.dp_rank not in info.shards:
                raise TopologyMismatch(
                    f"{part.name!r} was published for DP ranks {list(info.shards)}, not {wanted.dp_rank}"
                ) from None
            if isinstance(error, ClaimTimeout):
                raise ClaimTimeout(_missing(info, wanted)) from None
            raise

    def _check_place(self, dp_rank: int) -> None:
        if self._topology is not None and self._topology.dp_rank != dp_rank:
            raise TopologyMismatch(f"DP rank {dp_rank} is fetched by its own ranks, and this is {self._topology}")

    def _check_size(self, dp_size: int) -> None:
        if self._topology is not None and self._topology.dp != dp_size:
            raise TopologyMismatch(f"the rollout was published for {dp_size} DP ranks, and this is {self._topology}")

    def cleanup(self, rollout_id: int) -> None:
        """Ends a rollout, wherever it stands: its bytes are free, and it counts as finished. Again: no effect.

        Not needed after training: a rollout that all tasks have acked goes by itself.
        """
        _check_id(rollout_id)
        part = self._partition(rollout_id)
        part.seal()
        part.clear(prefix=KEY_PREFIX)

    def rewind(self, rollout_id: int) -> None:
        """Forgets this rollout and all later ones, so that they can be published anew.

        For the one process that restarts a job from a checkpoint, while no other publishes or fetches.
        """
        _check_id(rollout_id)
        for found in self._known():
            if found >= rollout_id:
                self._delete(found)

    def live(self) -> list[int]:
        """Returns the rollouts that were published and are not finished, ascending."""
        return [number for number, info in sorted(self._known().items()) if info.sealed and not info.retired]

    def close(self) -> None:
        """Closes the client if `connect` made it: what this process holds is given back. Repeatable."""
        if self._owned is not None:
            self._owned.close()

    def _partition(self, rollout_id: int) -> Partition:
        """Finds the partition of a rollout, or makes it: whoever comes first, publisher or trainer."""
        return self._client.create_partition(
            self._name(rollout_id),
            consumers=self.options.tasks,
            max_attempts=self.options.max_attempts,
            exist_ok=True,
        )

    def _name(self, rollout_id: int) -> str:
        return f"{self.options.run}/{rollout_id:08d}"

    def _known(self) -> dict[int, tqclient.PartitionInfo]:
        found = self._client.partitions(f"{self.options.run}/")
        return {int(number): info for info in found if (number := info.name.rpartition("/")[2]).isdecimal()}

    def _forget_finished(self, before: int) -> None:
        for number, info in self._known().items():
            if number < before and info.retired:
                self._delete(number)

    def _delete(self, rollout_id: int) -> None:
        try:
            self._client.delete_partition(self._name(rollout_id))
        except PartitionNotFound:
            return  # somebody else did

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self.options.timeout if timeout is None else seconds_of(timeout, what="timeout"))

    def __enter__(self) -> RolloutBridge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RolloutBridge of {self.options.run!r} over {self._client!r}>"


def _missing(info: tqclient.PartitionInfo, wanted: Wanted) -> str:
    """Says why a share cannot be fetched yet."""
    share = f"{info.name!r}: the share of DP rank {wanted.dp_rank} for task {wanted.task!r}"
    if not info.sealed:
        return f"{share} is not there: the rollout was not published in time"
    if unwritten := [name for name in wanted.fields if name not in info.fields]:
        return f"{share} lacks {', '.join(unwritten)}: no task has written that in time"
    late = [name for name in wanted.fields if info.fields[name].written < info.samples]
    why = f"some samples lack {', '.join(late)}, or " if late else ""
    return f"{share} was not to be had in time: {why}another process holds it"


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _worth(deadline: float) -> float:
    """Seconds for what comes after a wait: one that took the whole timeout must not have been in vain."""
    return max(_left(deadline), limits.CALL_TIMEOUT)


def _check_id(rollout_id: int) -> None:
    if isinstance(rollout_id, bool) or not isinstance(rollout_id, int) or rollout_id < 0:
        raise InvalidArgument(f"rollout_id={rollout_id!r}: expected an int, 0 or more")


def _check_ranges(ranges: Ranges | None, fields: Sequence[str]) -> None:
    """Raises InvalidArgument for what is no range, or of a field that is not fetched: its rows would come whole."""
    for wanted in wanted_ranges(ranges):
        if not _ranges_of({wanted.path: ()}, fields):
            raise InvalidArgument(
                f"ranges[{wanted.path!r}]: that is not fetched; what is: {', '.join(map(repr, fields))}"
            )


def _ranges_of(ranges: Ranges | None, fields: Sequence[str]) -> Ranges | None:
    """Returns the ranges of these fields, and of what lies within them, such as `images.pixels`."""
    chosen = {
        path: given
        for path, given in (ranges or {}).items()
        if any(path == name or path.startswith(f"{name}.") for name in fields)
    }
    return chosen or None


def _in_order(claimed: Batch, partition: Sequence[Any]) -> list[int]:
    """Returns the ids of a shard's samples in the order of its partition."""
    found = dict(zip(claimed.keys, claimed.ids.tolist(), strict=True))
    wanted = [f"{KEY_PREFIX}{int(row)}" for row in partition]
    if sorted(wanted) != sorted(map(str, found)):
        raise InternalError(f"a shard of {len(wanted)} samples was delivered with {len(found)}, or with others")
    return [found[key] for key in wanted]
