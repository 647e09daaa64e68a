"""A batch of samples: values by field, and what is known of each row. No I/O happens in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument
from tqclient.operations.claims import ClaimHandle, abandon
from tqclient.operations.read import Delivery
from tqclient.state import ClientState


class BatchData:
    """Rows of samples, as a mapping from field name to value.

    `batch[field]` gives what went in: one tensor or array for a column that was put as one, a jagged NestedTensor for
    a list of tensors, a dict of those for dicts, a list for the rest. Iterating gives the fields; `len()` counts them.
    `keys` are those of the samples: `dict(batch.items())` makes a plain dict.

    Unless it was read with `copy=False`, a batch owns its values. Views are good until the batch is closed, settled, or
    collected as garbage; what is needed longer must be cloned before.
    """

    def __init__(self, state: ClientState, delivery: Delivery, handle: ClaimHandle | None = None) -> None:
        """Made by `Partition.get` and `Consumer.claim`."""
        self._state = state
        self._rows = delivery.rows
        self._columns = delivery.columns
        self._values = {name: column.value for name, column in delivery.columns.items()}
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
        return self._rows.tags

    @property
    def weight_versions(self) -> NDArray[np.int64]:
        """Weight versions, int64 `[rows, 2]`: the lowest and the highest that made the sample; -1 where it has none."""
        return self._rows.weight_versions

    @property
    def attempts(self) -> NDArray[np.int64]:
        """Deliveries of each sample to this consumer with this one, int64 `[rows]`; 0 where nothing was claimed."""
        return self._rows.attempts

    def __getitem__(self, field: str) -> Any:
        try:
            return self._values[field]
        except KeyError:
            raise KeyError(f"{field!r} is not in this batch; it has {', '.join(map(repr, self._values))}") from None

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
        """Returns a ragged field as one tensor `[rows, longest, ...]`, filled up with `value`; a copy."""
        return self._column(field).padded(value)

    def _column(self, field: str) -> Any:
        if field not in self._columns:
            return self[field]  # raises what a missing field raises
        return self._columns[field]

    def to_tensordict(self) -> Any:
        """Returns a TensorDict of the batch; what is no tensor becomes non-tensor data. Shares the tensors.

        Raises:
            InvalidArgument: tensordict is not installed.
        """
        return _as_tensordict(self._values, self.rows)

    def close(self) -> None:
        """Lets go of views, and of a claim that was not settled (its samples are delivered again). Repeatable."""
        self._finalizer()

    def _claimed(self) -> ClaimHandle:
        if self._handle is None:
            raise InvalidArgument("this batch was read with get(); only a claimed batch is acked, released or renewed")
        return self._handle

    def __repr__(self) -> str:
        state = "read" if self._handle is None else self._handle.verdict or "claimed"
        return f"<Batch of {self.rows} rows, {state}: {', '.join(self._values)}>"


def _let_go(state: ClientState, handle: ClaimHandle | None, close_holdings: Callable[[], None]) -> None:
    if handle is not None:
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
    return NonTensorStack(*value) if isinstance(value, list) else value
