"""What `init` is given, and what all processes of a job share of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tqclient.client import Client
from tqclient.compat.transfer_queue.samplers import BaseSampler, SequentialSampler, make
from tqclient.errors import PartitionNotFound

INTERNAL: Final = ".transfer_queue/"
"""Begins the names of the partitions that hold this module's own records."""
SETTINGS: Final = INTERNAL + "config"
DEFAULT_ADDRESS: Final = "127.0.0.1:7700"
"""Where `tq up` listens."""


class Config(dict[str, Any]):
    """A nested dict whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _config, (dict(self),)


def _config(values: Mapping[str, Any]) -> Config:
    return Config(values)


def pick(conf: Any, *path: str) -> Any:
    """Returns a value of a nested configuration (dicts, DictConfigs or objects); None where there is none."""
    for name in path:
        if conf is None:
            return None
        conf = conf.get(name) if hasattr(conf, "get") else getattr(conf, name, None)
    return conf


def address_of(conf: Any) -> str:
    """Returns where the service is: `controller.address` of the configuration, TQ_CONTROLLER, or this machine."""
    return pick(conf, "controller", "address") or os.environ.get("TQ_CONTROLLER") or DEFAULT_ADDRESS


class Settings:
    """The sampler and the polling mode of a job: stored by who gives them to `init`, taken over by all others."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sampler: BaseSampler | None = None
        self._polling = False

    @property
    def sampler(self) -> BaseSampler:
        """How samples are picked."""
        if self._sampler is None:
            self._load()
        return self._sampler or SequentialSampler()

    @property
    def polling(self) -> bool:
        """Whether get_meta returns an empty batch instead of waiting."""
        if self._sampler is None:
            self._load()
        return self._polling

    def store(self, conf: Any) -> None:
        """Stores what a configuration says; what it does not say is as by default.

        Raises:
            InvalidArgument: the sampler is none that the controller has.
        """
        sampler = make(pick(conf, "controller", "sampler") or SequentialSampler())
        polling = bool(pick(conf, "controller", "polling_mode"))
        values = {"sampler": type(sampler).__name__, "params": sampler.params, "polling_mode": polling}
        self._client.create_partition(SETTINGS, exist_ok=True).metadata.update(values)
        self._sampler, self._polling = sampler, polling

    def _load(self) -> None:
        try:
            values = self._client.partition(SETTINGS).metadata.to_dict()
        except PartitionNotFound:
            values = {}
        if values:
            self._sampler = make(values["sampler"], values["params"])
            self._polling = values["polling_mode"]
        else:
            self._sampler = SequentialSampler()


def names(client: Client) -> Iterator[str]:
    """Yields the names of the partitions that are not this module's own."""
    return (info.name for info in client.partitions() if not info.name.startswith(INTERNAL))
