"""Ray's object store: a driver puts, an actor gets; references travel in the call of a method."""

from __future__ import annotations

import queue
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import ray

from benchmarks.peers import bootstrap, forms, host
from benchmarks.workloads import ROLLOUT_SOURCE, ROLLOUT_VALUES, Columns

TORCH, SAMPLES, NUMPY = "torch tensors", "object a sample", "numpy, zero-copy"
NAMESPACE: Final = "tq-bench"
ACTOR: Final = "target"
STORE_SPARE_BYTES: Final = 512 << 20
STORE_BATCHES: Final = 3


def start(setup: host.Setup) -> str:
    """Starts the daemons of a Ray of its own, children of this process; returns its address."""
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=STORE_BATCHES * setup.size_bytes + STORE_SPARE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        namespace=NAMESPACE,
        _temp_dir=f"{setup.directory}/ray",
    )
    address: str = ray.get_runtime_context().gcs_address
    return address


def connect(setup: host.Setup) -> None:
    """Makes this process a driver."""
    ray.init(address=setup.storage["address"], namespace=NAMESPACE, log_to_driver=False)


def disconnect() -> None:
    """Ends that; where this process has started the daemons, it ends them."""
    ray.shutdown()


class Storage(host.Storage):
    """The daemons."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._address = start(setup)

    def where(self) -> dict[str, Any]:
        """Returns the address."""
        return {"address": self._address}

    def close(self) -> None:
        """Stops them."""
        ray.shutdown()


class Source(host.Source):
    """A driver that puts."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        connect(setup)
        self._refs: dict[int, list[Any]] = {}

    def put(self, way: str, number: int) -> None:
        """One object for the batch, or one for each sample."""
        if way == SAMPLES:
            self._refs[number] = [ray.put(sample) for sample in forms.samples(self.columns)]
        elif way == NUMPY:
            self._refs[number] = [ray.put(forms.numpy_columns(self.columns))]
        else:
            self._refs[number] = [ray.put(self.columns)]

    def announce(self, way: str, number: int) -> None:
        """Calls the consumer with the references."""
        ray.get_actor(ACTOR).offer.remote(number, self._refs[number])

    def drop(self, way: str, number: int) -> None:
        """Lets go of the references."""
        del self._refs[number]

    def close(self) -> None:
        """Leaves."""
        ray.shutdown()
        super().close()


class Target:
    """A driver that starts the actor, which is the target, and passes the runner's commands on to it."""

    def __init__(self, setup: host.Setup) -> None:
        connect(setup)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        root = str(Path(bootstrap.__file__).parents[1])
        options = {"name": ACTOR, "max_concurrency": 2, "num_cpus": 1}
        self._actor = ray.remote(_Actor).options(**options).remote(root, asdict(setup))

    def commands(self) -> host.Commands:
        """Returns those of the actor."""
        names = ray.get(self._actor.names.remote())
        return {name: lambda *arguments, name=name: self._call(name, *arguments) for name in names}

    def _call(self, name: str, *arguments: Any) -> Any:
        return ray.get(self._actor.call.remote(name, *arguments))

    def close(self) -> None:
        """Ends the actor."""
        ray.kill(self._actor)
        ray.shutdown()


class _Actor:
    """What the actor's process runs; it travels there by value, so it uses nothing of this module."""

    def __init__(self, root: str, setup: dict[str, Any]) -> None:
        import importlib
        import sys
        import types

        package = types.ModuleType("benchmarks")
        package.__path__ = [root]
        sys.modules.setdefault("benchmarks", package)
        host = importlib.import_module("benchmarks.peers.host")
        self._taker = importlib.import_module("benchmarks.peers.ray_store").Taker(host.Setup(**setup))
        self._commands = host.TargetCommands(self._taker)

    def names(self) -> list[str]:
        return list(self._commands)

    def call(self, name: str, *arguments: Any) -> Any:
        return self._commands[name](*arguments)

    def offer(self, number: int, refs: list[Any]) -> None:
        self._taker.offers.put((number, refs))


class Taker(host.Target):
    """The consumer, in the actor's process."""

    def __init__(self, setup: host.Setup) -> None:
        self.setup = setup
        self.offers: queue.Queue[tuple[int, list[Any]]] = queue.Queue()
        self._refs: list[Any] = []
        self._written: list[Any] = []

    def wait(self, way: str) -> int:
        """Waits until the producer has called."""
        number, self._refs = self.offers.get(timeout=host.WAIT_SECONDS)
        return number

    def take(self, way: str, number: int) -> Any:
        """Gets the objects."""
        values = ray.get(self._refs)
        if way == SAMPLES:
            return values
        return forms.from_numpy_columns(values[0]) if way == NUMPY else values[0]

    def write_back(self, way: str, number: int, values: Any) -> None:
        """Puts one more object, or one for each sample."""
        written = [sample[ROLLOUT_SOURCE] for sample in values] if way == SAMPLES else [values[ROLLOUT_SOURCE]]
        self._written = [ray.put(value) for value in written]

    def retake(self, way: str, number: int) -> Any:
        """Gets both."""
        taken, written = self.take(way, number), ray.get(self._written)
        if way == SAMPLES:
            return [{**sample, ROLLOUT_VALUES: values} for sample, values in zip(taken, written, strict=True)]
        return {**taken, ROLLOUT_VALUES: written[0]}

    def columns(self, way: str, values: Any) -> Columns:
        """Returns samples as columns."""
        return forms.from_samples(values) if way == SAMPLES else values

    def drop(self, way: str, number: int) -> None:
        """Lets go of the references."""
        self._refs, self._written = [], []
