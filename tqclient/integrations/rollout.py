"""One DP rank's share of a rollout, as its ranks see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.consumer import Batch
from tqclient.errors import InvalidArgument
from tqclient.operations.ranges import Ranges
from tqclient.partition import Partition
from tqclient.torch.devices import Mover


def mover_to(device: str) -> Mover:
    """Returns what moves tensors to a device.

    Raises:
        InvalidArgument: it is not there.
    """
    if device.partition(":")[0] == "npu":
        try:
            __import__("torch_npu")
        except ImportError:
            raise InvalidArgument(f"device={device!r} is not there: torch_npu is not installed") from None
    return Mover(device, None)


class Rollout(Mapping[str, Any]):
    """A mapping of the fetched fields and the schedule.

    A field with one tensor per sample is a list of tensors; one that was put as a tensor is a tensor; the rest are
    lists. Schedule fields are what was published for this DP rank. Samples come in the order of `partition`.

    As a context manager it is acked when its block ends normally, and given back, to be fetched again, when it ends by
    an exception.

    Attributes:
        rollout_id: of the rollout.
        dp_rank: whose share it is.
        schedule: the schedule fields that were published.
        batch: the samples' values on the host, with ids, keys and weight versions; may hold more fields.
    """

    def __init__(
        self,
        batch: Batch,
        facts: Mapping[str, Any],
        mover: Mover,
        claimed: Batch | None = None,
        part: Partition | None = None,
    ) -> None:
        """Made by `RolloutBridge.fetch` and `from_buffer`."""
        self.rollout_id: int = facts["rollout_id"]
        self.dp_rank: int = facts["dp_rank"]
        self.schedule: dict[str, Any] = facts["schedule"]
        self.batch = batch
        self._fields: list[str] = facts["fields"]
        self._mover = mover
        self._claimed = claimed
        self._part = part
        self._made: dict[str, Any] = {}

    @property
    def ids(self) -> NDArray[np.int64]:
        """Sample ids, int64 `[samples]`: the same for every task, and at any later fetch."""
        return self.batch.ids

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.batch.rows

    def __getitem__(self, name: str) -> Any:
        if name in self.schedule:
            return self.schedule[name]
        if name not in self._fields:
            raise KeyError(f"{name!r} is not in this rollout; it has {', '.join(self)}")
        if name not in self._made:
            value, ready = self._mover.move(self._value(name))
            self._mover.arrived(value, ready)
            self._made[name] = value
        return self._made[name]

    def _value(self, name: str) -> Any:
        value = self.batch[name]
        dense = isinstance(value, torch.Tensor | np.ndarray) and not getattr(value, "is_nested", False)
        return value if dense else self.batch.list(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._fields, *self.schedule])

    def __len__(self) -> int:
        return len(self._fields) + len(self.schedule)

    def put(self, columns: Mapping[str, Any]) -> None:
        """Writes further fields of these samples, such as a critic's `values`; fetches that name them wait for it.

        Written again, by a task that fetched again after a crash, they are replaced.

        Args:
            columns: field → one value per sample, in the order of this rollout's.

        Raises:
            InvalidArgument: this one came by broadcast: the rank that fetched writes.
            SchemaMismatch: a field has other dtypes or shapes than other shards' have.
        """
        self._fetched().put(dict(columns), ids=self.ids, upsert=True)

    def read(self, fields: Sequence[str], *, ranges: Ranges | None = None) -> Batch:
        """Reads further fields of these samples, or other ranges of their rows; on the host.

        Args:
            fields: that were written.
            ranges: as `Partition.get` has them.

        Raises:
            SampleNotFound: a field was not written, or the rollout was cleaned up.
            InvalidArgument: this one came by broadcast; or a range does not fit.
        """
        return self._fetched().get(self.ids, fields=fields, ranges=ranges)

    def _fetched(self) -> Partition:
        if self._part is None:
            raise InvalidArgument("this rollout came by broadcast: the rank that fetched it reads and writes")
        return self._part

    def ack(self) -> None:
        """Says that this task is done with it. Again, or for one that came by broadcast: no effect.

        Raises:
            LeaseExpired: another member of the DP rank died, or this process was not heard of for a lease: fetch again.
        """
        if self._claimed is not None:
            self._claimed.ack()

    def release(self) -> None:
        """Gives it back, to be fetched again. For one that came by broadcast: no effect."""
        if self._claimed is not None:
            self._claimed.release()

    def to_buffer(self) -> torch.Tensor:
        """Returns all of it as one tensor, uint8 `[bytes]`, on the host, for others of the DP rank to be broadcast."""
        facts: dict[str, Any] = {"rollout_id": self.rollout_id, "dp_rank": self.dp_rank}
        facts |= {"schedule": self.schedule, "fields": self._fields}
        return self.batch.to_buffer(facts, fields=self._fields)

    @classmethod
    def from_buffer(cls, buffer: Any, device: str = "cpu") -> Rollout:
        """Returns the rollout that `to_buffer` made the buffer of.

        Args:
            buffer: uint8 `[bytes]`, on any device; may be longer. Values are views of it where it lies on the host.
            device: where the tensors go.

        Raises:
            InvalidArgument: it is something else, or the device is not there.
            CorruptBlock: it is cut or damaged.
        """
        batch = Batch.from_buffer(buffer)
        return cls(batch, batch.extra, mover_to(device))

    def __enter__(self) -> Rollout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._claimed is not None:
            self._claimed.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return f"<Rollout {self.rollout_id}, DP rank {self.dp_rank}: {self.samples} samples, {', '.join(self)}>"
