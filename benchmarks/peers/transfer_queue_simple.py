"""TransferQueue with its default backend, through its key-value interface.

Its own waiting is a poll, or one that stops its controller meanwhile; so the consumer waits for the datagram here.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from benchmarks.peers import forms, host, ray_store
from benchmarks.workloads import ROLLOUT_SOURCE, ROLLOUT_VALUES, Columns

PARTITION: Final = "bench"


class Storage(ray_store.Storage):
    """Ray, and on it the controller and the storage units."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        tq.init(OmegaConf.create(self.configuration(setup)))

    def configuration(self, setup: host.Setup) -> dict[str, Any]:
        """Returns what differs from its defaults."""
        return {"backend": {"storage_backend": "SimpleStorage"}}

    def close(self) -> None:
        """Stops all."""
        tq.close()
        super().close()


def _keys(number: int, rows: int) -> list[str]:
    return [f"{number}/{row}" for row in range(rows)]


def _native(column: Any) -> Any:
    """Returns a column, whose lists of tensors are jagged tensors already, in the container that it asks for."""
    return column if isinstance(column, torch.Tensor) else NonTensorStack.from_list(list(column))


class Source(host.Source):
    """Puts one key for each sample, all in one call."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        ray_store.connect(setup)
        tq.init()
        self._fields: Any = None

    def prepare(self, way: str, number: int) -> None:
        """Makes a TensorDict of the batch, with a jagged tensor for each list of tensors."""
        fields = {name: _native(column) for name, column in forms.jagged(self.columns).items()}
        self._fields = TensorDict(fields, batch_size=[self.setup.rows])

    def put(self, way: str, number: int) -> None:
        """One `kv_batch_put`."""
        tq.kv_batch_put(keys=_keys(number, self.setup.rows), partition_id=PARTITION, fields=self._fields)

    def drop(self, way: str, number: int) -> None:
        """Clears the keys."""
        tq.kv_clear(keys=_keys(number, self.setup.rows), partition_id=PARTITION)

    def close(self) -> None:
        """Leaves."""
        ray_store.disconnect()
        super().close()


class Target(host.Target):
    """Gets all keys in one call."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        ray_store.connect(setup)
        tq.init()

    def take(self, way: str, number: int) -> Any:
        """One `kv_batch_get`."""
        return tq.kv_batch_get(keys=_keys(number, self.setup.rows), partition_id=PARTITION)

    def write_back(self, way: str, number: int, values: Any) -> None:
        """One `kv_batch_put` of one field."""
        fields = TensorDict({ROLLOUT_VALUES: values[ROLLOUT_SOURCE]}, batch_size=[self.setup.rows])
        tq.kv_batch_put(keys=_keys(number, self.setup.rows), partition_id=PARTITION, fields=fields)

    def columns(self, way: str, values: Any) -> Columns:
        """Takes the containers apart."""
        return {name: _rows(values.get(name)) for name in values.keys()}  # noqa: SIM118 - a TensorDict iterates over rows

    def close(self) -> None:
        """Leaves."""
        ray_store.disconnect()
        super().close()


def _rows(column: Any) -> Any:
    if isinstance(column, torch.Tensor):
        return column.unbind() if column.is_nested else column
    return column.tolist() if hasattr(column, "tolist") else list(column)
