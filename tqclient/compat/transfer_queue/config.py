"""What `init` is given, and what all processes of a job share of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from tqclient import limits
from tqclient.client import Client
from tqclient.compat.transfer_queue.samplers import BaseSampler, SequentialSampler, make
from tqclient.errors import InvalidArgument, PartitionNotFound, TQError
from tqclient.info import PartitionRef
from tqclient.operations import partitions, producers
from tqclient.operations.effects import Operation

T = TypeVar("T")

INTERNAL: Final = ".transfer_queue/"
"""Begins the names of the partitions that hold this module's own records."""
SETTINGS: Final = INTERNAL + "config"
DEFAULTS: Final[Mapping[str, Any]] = {"sampler": "SequentialSampler", "params": {}, "polling_mode": False}
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
    """The sampler and the polling mode of a job: stored by who gives them to `init`, taken over by all others.

    Who stored them is registered with their partition as a producer: so it can be told whether anybody stands for them.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sampler: BaseSampler | None = None
        self._polling = False
        self._stored: PartitionRef | None = None

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
        """Stores what a configuration says. What it does not say stays as this job's processes have it.

        Raises:
            InvalidArgument: the sampler is none that the controller has, or a process that is connected gave others.
        """
        given = _given(conf)
        if not given:
            return
        try:
            self._store(given)
        except PartitionNotFound:  # the last process of the job before closed meanwhile
            self._store(given)

    def _store(self, given: Mapping[str, Any]) -> None:
        first = {**DEFAULTS, **given}
        part = self._client.create_partition(SETTINGS, metadata=first, exist_ok=True)
        fresh = self._stored is None or self._stored.partition_id != part._ref.partition_id
        if fresh:
            self._run(producers.register(self._client._state, part._ref))
            self._stored = part._ref
        stored = part.metadata.to_dict()
        others = part.describe().producers > 1
        chosen = {**stored, **given} if others or not fresh else first  # a job that ended has no say in this one
        if others and chosen != stored:
            if fresh:
                self.release()
            raise InvalidArgument(
                f"init: {_text(chosen)}, but another process, which is connected, gave this job {_text(stored)}: give "
                "the same, or nothing. If that was another job, have its processes close(); those that were killed "
                "count until their lease has run out"
            )
        if chosen != stored:
            part.metadata.update(chosen)
        self._take_over(chosen)

    def release(self) -> None:
        """Removes what was stored, unless another process that stored it is connected still.

        It is left where the service does not answer at once.
        """
        ref, self._stored = self._stored, None
        if ref is None:
            return
        state, timeout = self._client._state, limits.BACKOFF_MAX
        with suppress(TQError):
            self._run(producers.unregister(state, ref, timeout))
            if not self._run(partitions.partition_info(state, ref, timeout)).producers:
                self._run(partitions.delete_partition(state, SETTINGS, timeout))

    def _load(self) -> None:
        try:
            part = self._client.partition(SETTINGS)
            stored = part.metadata.to_dict()
            given_up = not part.describe().producers
        except PartitionNotFound:
            self._take_over(DEFAULTS)
            return
        if given_up and stored != DEFAULTS:
            warnings.warn(
                f"{_text(stored)}: taken over from a process that is not connected any more; if that was another job, "
                "have one process give init() the sampler and the polling_mode of this one",
                RuntimeWarning,
                stacklevel=2,
            )
        self._take_over(stored)

    def _take_over(self, values: Mapping[str, Any]) -> None:
        self._sampler, self._polling = make(values["sampler"], values["params"]), values["polling_mode"]

    def _run(self, operation: Operation[T]) -> T:
        return self._client._run(operation)


def _given(conf: Any) -> dict[str, Any]:
    """Returns what a configuration says of sampler and polling mode, as it is stored."""
    given: dict[str, Any] = {}
    chosen, polling = pick(conf, "controller", "sampler"), pick(conf, "controller", "polling_mode")
    if chosen is not None:
        sampler = make(chosen)
        given = {"sampler": type(sampler).__name__, "params": sampler.params}
    if polling is not None:
        given["polling_mode"] = bool(polling)
    return given


def _text(values: Mapping[str, Any]) -> str:
    params = ", ".join(f"{name}={value}" for name, value in values["params"].items())
    return f"sampler {values['sampler']}({params}) with polling_mode={values['polling_mode']}"


def names(client: Client) -> Iterator[str]:
    """Yields the names of the partitions that are not this module's own."""
    return (info.name for info in client.partitions() if not info.name.startswith(INTERNAL))
