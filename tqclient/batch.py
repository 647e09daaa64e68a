"""A batch of samples: values by field, and what is known of each row. No I/O happens in it."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import names_of
from tqclient.codec import Column
from tqclient.codec.buffers import rows_of, tensor_over
from tqclient.errors import InvalidArgument, TQError, UnsupportedValue
from tqclient.operations.claims import ClaimHandle, abandon
from tqclient.operations.read import Delivery, Holdings
from tqclient.state import ClientState

if TYPE_CHECKING:
    import torch

BatchT = TypeVar("BatchT", bound="BatchData")


class _Values(Mapping[str, Any]):
    """The value of each column, made when it is first asked for: that of a shared one has to be put together."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns
        self._made: dict[str, Any] = {}

    def __getitem__(self, field: str) -> Any:
        if field not in self._made:
            self._made.setdefault(field, self._columns[field].value)
        return self._made[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, field: object) -> bool:
        return field in self._columns


class BatchData:
    """Rows of samples, as a mapping from field name to value.

    `batch[field]` gives what went in: one tensor or array for a column that was put as one, a jagged NestedTensor for
    a list of tensors, a dict of those for dicts, a list for the rest. Iterating gives the fields; `len()` counts them.
    `keys` are those of the samples: `dict(batch.items())` makes a plain dict.

    Unless it was read with `copy=False`, a batch owns its values. Views are good until the batch is closed, settled, or
    collected as garbage; what is needed longer must be cloned before. `verify` compares them with their checksums.
    Never write to a view, as `batch[field].add_(1)` does: where it shows the arena of this host, which is mapped to be
    read, an array raises, but torch knows no read-only tensors, and the store ends the process (SIGSEGV). Clone first.
    """

    extra: Any = None
    """What `to_buffer` was given to go along, in a batch that `from_buffer` made."""
    _tags: list[dict[str, Any]] | None = None

    def __init__(self, state: ClientState | None, delivery: Delivery, handle: ClaimHandle | None = None) -> None:
        """Made by `Partition.get` and `Consumer.claim`."""
        if state is not None:
            self._state = state
        self._rows = delivery.rows
        self._columns = delivery.columns
        self._holdings = delivery.holdings
        self._values: Mapping[str, Any] = _Values(delivery.columns)
        self._handle = handle
        # Whoever forgets a batch must not hold up others: its samples are delivered again.
        self._finalizer = weakref.finalize(self, _let_go, state, handle, delivery.holdings.close)
        self._finalizer.atexit = False

    @property
    def fields(self) -> list[str]:
        """Names of the fields, in the order in which they were asked for."""
        return list(self._values)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._rows.ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Sample ids, int64 `[rows]`."""
        return self._rows.ids

    @property
    def keys(self) -> list[str | None]:
        """Key of each sample; None where it has none."""
        return self._rows.keys

    @property
    def groups(self) -> list[Any]:
        """Group of each sample: str, int or bytes; None where it has none."""
        return self._rows.groups

    @property
    def tags(self) -> list[dict[str, Any]]:
        """Tags of each sample."""
        if self._tags is None:
            self._tags = self._rows.tags_by_row()
        return self._tags

    @property
    def weight_versions(self) -> NDArray[np.int64]:
        """Weight versions, int64 `[rows, 2]`: the lowest and the highest that made the sample; -1 where it has none."""
        return self._rows.weight_versions

    @property
    def attempts(self) -> NDArray[np.int64]:
        """Deliveries of each sample to this consumer with this one, int64 `[rows]`; 0 where nothing was claimed."""
        return self._rows.attempts

    @property
    def step(self) -> int | None:
        """Number of the batch within its DP rank, from 0; None unless it was claimed with a topology."""
        return None if self._handle is None else self._handle.step

    def __getitem__(self, field: str) -> Any:
        try:
            return self._values[field]
        except KeyError:
            raise self._missing(field) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, field: object) -> bool:
        return field in self._values

    def items(self) -> ItemsView[str, Any]:
        """Pairs of field and value."""
        return self._values.items()

    def values(self) -> ValuesView[Any]:
        """Values, in the order of `fields`."""
        return self._values.values()

    def get(self, field: str, default: Any = None) -> Any:
        """Returns the value of a field, or the default when the batch lacks it."""
        return self._values.get(field, default)

    def list(self, field: str) -> list[Any]:
        """Returns a field as a list with one value per row; tensors in it are views of the column."""
        values: list[Any] = self._column(field).list()
        return values

    def padded(self, field: str, value: Any = 0) -> Any:
        """Returns a ragged field as one tensor or array `[rows, longest, ...]`, filled up with `value`; a copy.

        Args:
            field: of rows that differ in their leading dimension alone.
            value: of the field's dtype; among floats, it may be rounded to one.

        Raises:
            InvalidArgument: the field is not ragged, or its dtype has no such value; names the field.
        """
        try:
            return self._column(field).padded(value)
        except InvalidArgument as error:
            raise InvalidArgument(f"field {field!r}: {error.message}") from None

    def _column(self, field: str) -> Any:
        if not isinstance(field, str) or field not in self._columns:
            raise self._missing(field)
        return self._columns[field]

    def _missing(self, field: object) -> KeyError:
        return KeyError(f"{field!r:.80} is not in this batch; it has {', '.join(map(repr, self._values))}")

    def _chosen(self, fields: Sequence[str] | None) -> dict[str, Column]:
        names = self.fields if fields is None else names_of(fields, what="fields")
        return {field: self._column(field) for field in names}

    def to_tensordict(self) -> Any:
        """Returns a TensorDict of the batch, which shares its memory.

        Arrays of numbers that torch has a dtype for become tensors. What else is no tensor becomes non-tensor data,
        one value per row, as `list` gives them: a row of an array of texts, times or structures is an array.

        Raises:
            InvalidArgument: tensordict is not installed.
        """
        return _as_tensordict(dict(self._values), self.rows)

    def to_buffer(self, extra: Any = None, *, fields: Sequence[str] | None = None) -> torch.Tensor:
        """Returns the batch as one tensor, uint8 `[bytes]`, that a framework broadcasts; a copy.

        Its header says all that `from_buffer` must know. The claim stays with this batch.

        Args:
            extra: anything of the caller's own to go along, such as a schedule; comes out exactly, as `.extra`.
            fields: to go along; None: all.

        Raises:
            UnsupportedValue: `extra` holds what the block format cannot carry.
            KeyError: the batch has no such field.
        """
        from tqclient import flat

        return flat.pack(self._rows, self._chosen(fields), extra)

    @classmethod
    def from_buffer(cls: type[BatchT], buffer: Any) -> BatchT:
        """Returns the batch that `to_buffer` made the buffer of.

        Its values are views of a buffer in this process' memory, which must not change while they are in use; one on an
        accelerator is copied to the host. Its rows are not claimed: whoever fetched them acks.

        Args:
            buffer: a tensor or an array, uint8 `[bytes]`; may be longer than the batch.

        Raises:
            InvalidArgument: it is something else.
            CorruptBlock: it is cut or damaged.
        """
        from tqclient import flat

        rows, columns, extra = flat.unpack(buffer)
        batch = cls.__new__(cls)
        BatchData.__init__(batch, None, Delivery(rows, columns, Holdings()))
        batch.extra = extra
        return batch

    def verify(self, fields: Sequence[str] | None = None) -> None:
        """Compares views with their checksums.

        What was copied, or came from another host, was compared when it was read. A view of this host's memory is not
        unless it is asked for here: what it shows is kept in place by the claim, or the read, and reading all of it
        only to compare it would cost more than handing it out. Hashing runs at about 10 GB/s.

        Args:
            fields: to be compared; None: all.

        Raises:
            CorruptBlock: names partition, field, row and sample. `get(ids)` without `copy=False` turns to a replica.
            InvalidArgument: the batch is closed or settled, and its views show nothing any more.
            KeyError: the batch has no such field.
        """
        if not self._finalizer.alive:
            raise InvalidArgument("the batch is closed or settled: verify views before that")
        for field in self._chosen(fields):
            check = self._holdings.checks.get(field)
            if check is not None:
                check()

    def close(self) -> None:
        """Lets go of views, and of a claim that was not settled (its samples are delivered again). Repeatable."""
        self._finalizer()

    def __reduce__(self) -> Any:
        raise UnsupportedValue(
            "a batch is of the process that read it: send batch.to_buffer(), of which Batch.from_buffer() makes a batch"
        )

    def _claimed(self) -> ClaimHandle:
        if self._handle is None:
            raise InvalidArgument("this batch was not claimed here; only a claimed one is acked, released or renewed")
        return self._handle

    def __repr__(self) -> str:
        state = "read" if self._handle is None else self._handle.verdict or "claimed"
        return f"<Batch of {self.rows} rows, {state}: {', '.join(self._values)}>"


class BlockBatch(BatchData):
    """A batch that a `with` block settles: acks it when the block ends normally, and releases it after an exception."""

    @abstractmethod
    def ack(self) -> None:
        """Consumes the samples."""

    @abstractmethod
    def release(self) -> None:
        """Gives the samples back."""

    @abstractmethod
    def _is_held(self) -> bool:
        """Whether there is a claim to settle, which is this process' own."""

    def __enter__(self: BatchT) -> BatchT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_held():
            if error is None:
                self.ack()
            else:
                self._release_after(error)
        self.close()

    def _release_after(self, error: BaseException) -> None:
        try:
            self.release()
        except TQError as failure:
            # The block's own exception matters more; the samples come back by the chores, or when the lease ends.
            if hasattr(error, "add_note"):
                error.add_note(f"the batch could not be released at once: {failure}")


def _let_go(state: ClientState | None, handle: ClaimHandle | None, close_holdings: Callable[[], None]) -> None:
    if handle is not None and state is not None:
        abandon(state, handle)
    close_holdings()


def _as_tensordict(value: Any, rows: int) -> Any:
    try:
        from tensordict import NonTensorStack, TensorDict
    except ImportError:
        raise InvalidArgument(
            "to_tensordict needs the package tensordict: pip install 'tq-dataplane[tensordict]'"
        ) from None
    if isinstance(value, dict):
        return TensorDict({name: _as_tensordict(each, rows) for name, each in value.items()}, batch_size=[rows])
    if isinstance(value, np.ndarray):
        tensor = tensor_over(value)
        value = rows_of(value) if tensor is None else tensor
    return NonTensorStack(*value) if isinstance(value, list) else value
