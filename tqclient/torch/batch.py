"""Batches as a loader yields them: fetched ahead, maybe by another process, maybe onto a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.batch import BlockBatch, _Values
from tqclient.codec import Column
from tqclient.codec.filling import filling
from tqclient.codec.kinds.struct import StructColumn
from tqclient.errors import InvalidArgument
from tqclient.operations.claims import Verdict
from tqclient.rows import RowSet
from tqclient.schema import Form


class Yielded(Protocol):
    """The claim of a batch that a loader has yielded."""

    def is_held(self) -> bool:
        """Whether it was not settled yet, as far as is known, and is this process' own."""
        ...

    def settle(self, verdict: Verdict) -> None:
        """Settles it; the first verdict stands."""
        ...

    def renew(self) -> None:
        """Renews it."""
        ...


class CarriedColumn(Column):
    """A column whose value was carried to another process or onto a device."""

    def __init__(self, form: Form, rows: int, value: Any) -> None:
        self.form = form
        self.rows = rows
        self._value = value

    @property
    def value(self) -> Any:
        return self._value

    def list(self) -> list[Any]:
        return list(self._value.unbind(0) if isinstance(self._value, torch.Tensor) else self._value)

    def padded(self, value: Any = 0) -> Any:
        if not isinstance(self._value, torch.Tensor) or self._value.layout != torch.jagged:
            return super().padded(value)
        jagged: Any = self._value
        values, offsets = jagged.values(), jagged.offsets()
        counts = offsets.diff()
        longest = int(counts.max()) if self.rows else 0
        shape = (self.rows, longest, *values.shape[1:])
        target = torch.empty(shape, dtype=values.dtype, device=values.device).fill_(filling(value, values.dtype))
        target[torch.arange(longest, device=values.device) < counts[:, None]] = values
        return target

    def same_rows(self, other: Column) -> NDArray[np.bool_]:
        raise InvalidArgument("rows are compared where they were read, not where they were carried to")


def carry(column: Column, move: Callable[[Any], Any]) -> Column:
    """Returns a column with its tensors moved; arrays stay."""
    column = column.plain()
    if isinstance(column, StructColumn):
        children = {name: carry(child, move) for name, child in column.columns.items()}
        return StructColumn(column.form, children, column.rows)
    if column.form.container == "numpy":
        return column
    return CarriedColumn(column.form, column.rows, move(column.value))


class LoadedBatch(BlockBatch):
    """A batch that a `StreamingLoader` yields; read it like any `tqclient.Batch`. It owns its values.

    The loader acks it when the next one is asked for, unless it was settled before. As a context manager it is acked
    when the block ends normally, and released when it ends by an exception, unless it was settled before.
    """

    _step: int | None = None
    _claim: Yielded | None = None

    def __init__(self, rows: RowSet, columns: dict[str, Column], step: int | None) -> None:
        """Made by a loader; it has nothing to let go of, so there is no finalizer as other batches have one."""
        self._rows = rows
        self._columns = columns
        self._values = _Values(columns)
        self._handle = None
        self._step = step

    @property
    def step(self) -> int | None:
        """Number of the batch within its DP rank, from 0; None unless it was claimed with a topology."""
        return self._step

    def ack(self) -> None:
        """Consumes the samples now rather than when the next batch is asked for. Again: no effect.

        Raises:
            LeaseExpired: the claim is not held any more; its samples are, or will be, delivered again.
            InvalidArgument: it was released before, or no loader has yielded it.
        """
        self._yielded().settle("acked")

    def release(self) -> None:
        """Gives the samples back, to be delivered again; a delivery attempt has been spent. Again: no effect.

        Raises:
            LeaseExpired: the claim is not held any more.
            InvalidArgument: it was acked before, or no loader has yielded it.
        """
        self._yielded().settle("released")

    def renew(self) -> None:
        """Renews the claim now, for its whole lease; the loader's process does so all the time.

        Raises:
            LeaseExpired: the claim is not held any more.
            InvalidArgument: it was settled before, or no loader has yielded it.
        """
        self._yielded().renew()

    def verify(self, fields: Sequence[str] | None = None) -> None:
        """Does nothing: the values were compared with their checksums when they were copied.

        Raises:
            KeyError: the batch has no such field.
        """
        self._chosen(fields)

    def close(self) -> None:
        """Does nothing: the values are the batch's own, and its claim is the loader's."""

    def _is_held(self) -> bool:
        return self._claim is not None and self._claim.is_held()

    def _yielded(self) -> Yielded:
        if self._claim is None:
            raise InvalidArgument("only a batch that a StreamingLoader yielded is acked, released or renewed")
        return self._claim

    def carried(self, move: Callable[[Any], Any]) -> LoadedBatch:
        """Returns the same batch with every value moved."""
        columns = {name: carry(column, move) for name, column in self._columns.items()}
        return LoadedBatch(self._rows, columns, self._step)

    def __reduce__(self) -> tuple[Any, ...]:
        rows = replace(self._rows, runs={}, blocks={})  # where they lay is of no use elsewhere
        columns = {name: carry(column, lambda value: value) for name, column in self._columns.items()}
        return LoadedBatch, (rows, columns, self._step)

    def __repr__(self) -> str:
        return f"<LoadedBatch of {self.rows} rows: {', '.join(self._values)}>"
