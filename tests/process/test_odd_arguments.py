"""Each argument of each public call, given what it is not made for: it is taken, or a typed error, and nothing else."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tqclient as tq
from tqclient.torch import StreamingDataset, StreamingLoader
from tqserver.local import LocalCluster

ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "5": lambda: 5,
    "-1": lambda: -1,
    "True": lambda: True,
    "2.5": lambda: 2.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "2**63": lambda: 2**63,
    "10**400": lambda: 10**400,
    "''": lambda: "",
    "surrogate": lambda: "\ud800",
    "long": lambda: "x" * 10_000,
    "bytes": lambda: b"x",
    "[]": list,
    "[None]": lambda: [None],
    "[surrogate]": lambda: ["\ud800"],
    "[[1], [1, 2]]": lambda: [[1], [1, 2]],
    "{}": dict,
    "{5: 5}": lambda: {5: 5},
    "{surrogate: 5}": lambda: {"\ud800": 5},
    "{'a': object}": lambda: {"a": object()},
    "set": lambda: {"a", "b"},
    "object": object,
    "type": lambda: list,
    "function": lambda: len,
    "generator": lambda: (each for each in ["a"]),
    "numbers": lambda: np.array([1.5, 2.5]),
    "unsigned": lambda: np.array([2**64 - 1], np.uint64),
    "texts": lambda: np.array(["a", "b"]),
    "times": lambda: np.array([1, 2], "M8[ns]"),
    "objects": lambda: np.array([object(), None]),
    "scalar": lambda: np.array(7),
    "time": lambda: np.timedelta64(5, "ns"),
    "tensor": lambda: torch.tensor([1, 2]),
    "with grad": lambda: torch.ones(2, requires_grad=True),
    "meta": lambda: torch.empty(2, dtype=torch.int64, device="meta"),
    "dtype": lambda: torch.qint8,
}
ALLOWED = (tq.TQError, KeyError, StopIteration, StopAsyncIteration)
"""`KeyError` is what mappings raise that lack a name."""

_numbers = itertools.count()


class World:
    """A client with a partition, and what resolves what its methods return."""

    def __init__(self, client: Any, resolve: Callable[[Any], Any]) -> None:
        self.client = client
        self.resolve = resolve
        self.part = self.partition()
        values = {"x": torch.arange(64), "t": [torch.arange(3)] * 64, "s": [{"a": "b"}] * 64}
        self.ids = resolve(self.part.put(values, keys=[f"k{row}" for row in range(64)]))

    def partition(self) -> Any:
        """A new one."""
        return self.resolve(self.client.create_partition(f"odd-{next(_numbers)}"))

    def consumer(self, **more: Any) -> Any:
        """One that has the length of rows, too; there are only so many names."""
        return self.part.consumer(f"c{next(_numbers) % 200}", fields=["x", "t"], token_field="t", **more)

    def batch(self) -> Any:
        """A few rows."""
        return self.resolve(self.part.get(self.ids[:4]))

    def metadata(self) -> Any:
        """With something in it."""
        self.resolve(self.part.metadata.update({"a": 1}))
        return self.part.metadata

    def writer(self) -> Any:
        """Of one row of another partition."""
        return self.resolve(self.partition().allocate(1, {"a": ("int64", [2])}))


Call = tuple[Callable[..., Any], dict[str, Any]]
"""What to call, and arguments that it is made for."""

CREATE: dict[str, Any] = {
    **dict.fromkeys(inspect.signature(tq.Client.create_partition).parameters.keys() - {"self"}),
    "staleness": "drop",
    "replicas": 1,
    "max_attempts": 2,
    "lease": 10.0,
    "keep": False,
    "exist_ok": True,
    "consumers": ["a"],
}
ROWS: dict[str, Any] = {"keys": None, "groups": None, "weight_version": None, "tags": None, "timeout": 1}
READ: dict[str, Any] = {"ranges": None, "copy": True, "timeout": 1}
SIZES: dict[str, Any] = {"batch_size": 4, "max_tokens": None, "ranges": None}
TWO = {"x": [1, 2]}


def update(metadata: Any, values: Any) -> Any:
    """Takes by name what the method takes by position."""
    return metadata.update(values)


def load_state(loader: StreamingLoader, **more: Any) -> None:
    """Loads its own state, with something changed."""
    loader.load_state_dict({**loader.state_dict(), **more})


CALLS: dict[str, Callable[[World], Call]] = {
    "Client.create_partition": lambda w: (w.client.create_partition, {**CREATE, "name": f"odd-{next(_numbers)}"}),
    "Client.partition": lambda w: (w.client.partition, {"name": w.part.name}),
    "Client.partitions": lambda w: (w.client.partitions, {"prefix": "none"}),
    "Client.delete_partition": lambda w: (w.client.delete_partition, {"name": w.partition().name}),
    "Partition.shard": lambda w: (w.part.shard, {"shard": 1}),
    "Partition.put": lambda w: (
        w.partition().put,
        {"values": TWO, "ids": None, "upsert": False, "permit": None, **ROWS},
    ),
    "Partition.allocate": lambda w: (w.partition().allocate, {"rows": 2, "spec": {"a": ("int64", [1])}, **ROWS}),
    "Partition.permit": lambda w: (w.part.permit, {"samples": 1, "timeout": 1}),
    "Partition.get": lambda w: (w.part.get, {"ids": w.ids[:2], "keys": None, "fields": ["x"], **READ}),
    "Partition.consumer": lambda w: (
        w.part.consumer,
        {"name": "c", "fields": ["x"], "sampler": None, "topology": None, "where": None, "token_field": None},
    ),
    "Partition.set_tags": lambda w: (w.part.set_tags, {"ids": w.ids[:2], "tags": {"a": 1}}),
    "Partition.set_version": lambda w: (w.partition().set_version, {"version": 1}),
    "Partition.clear": lambda w: (
        w.partition().clear,
        dict.fromkeys(("ids", "keys", "groups", "tags", "prefix")),
    ),
    "Partition.watch": lambda w: (w.part.watch, {"from_seq": 0, "timeout": 0.05}),
    "Metadata.update": lambda w: (partial(update, w.part.metadata), {"values": {"b": 2}}),
    "Consumer.register": lambda w: (w.consumer(topology=tq.Topology()).register, {"timeout": 1}),
    "Consumer.claim": lambda w: (w.consumer().claim, {**SIZES, **READ}),
    "Consumer.batches": lambda w: (w.consumer().batches, SIZES),
    "Consumer.requeue": lambda w: (w.consumer().requeue, {"ids": w.ids[:2]}),
    "Batch.list": lambda w: (w.batch().list, {"field": "x"}),
    "Batch.padded": lambda w: (w.batch().padded, {"field": "t", "value": 0}),
    "Batch.to_buffer": lambda w: (w.batch().to_buffer, {"extra": None, "fields": ["x"]}),
    "Batch.from_buffer": lambda w: (w.batch().from_buffer, {"buffer": torch.zeros(4, dtype=torch.uint8)}),
    "Batch.verify": lambda w: (w.batch().verify, {"fields": ["x"]}),
    "Writer.commit": lambda w: (w.writer().commit, {"timeout": 1}),
    # What is within an argument.
    "values": lambda w: (lambda column: w.partition().put({"x": column}), {"column": [1]}),
    "samples": lambda w: (lambda sample: w.partition().put([sample]), {"sample": {"x": 1}}),
    "keys": lambda w: (lambda key: w.partition().put(TWO, keys=[key, "b"]), {"key": "a"}),
    "groups": lambda w: (lambda group: w.partition().put(TWO, groups=[group, "b"]), {"group": "a"}),
    "versions": lambda w: (lambda version: w.partition().put(TWO, weight_version=[version, 1]), {"version": 1}),
    "version": lambda w: (lambda most: w.partition().put(TWO, weight_version=(1, most)), {"most": 2}),
    "tags": lambda w: (lambda tag: w.partition().put(TWO, tags={"a": tag}), {"tag": 1}),
    "a row's tags": lambda w: (lambda tags: w.partition().put(TWO, tags=[tags, {}]), {"tags": {"a": 1}}),
    "ids": lambda w: (lambda number: w.part.get([number, int(w.ids[0])]), {"number": int(w.ids[1])}),
    "where": lambda w: (lambda tag: w.part.consumer("c", where={"a": tag}), {"tag": 1}),
    "ranges": lambda w: (
        lambda of, start, stop: w.part.get(w.ids[:2], ranges={"t": (start, stop), **({} if of is None else {"t": of})}),
        {"of": None, "start": 0, "stop": 2},
    ),
    "metadata": lambda w: (lambda value: w.part.metadata.update({"b": value}), {"value": 2}),
    "spec": lambda w: (
        lambda dtype, shape, size: w.partition().allocate(1, {"a": (dtype, shape), "b": {"c": ("int8", [size])}}),
        {"dtype": "int64", "shape": [1], "size": 2},
    ),
    "topology": lambda w: (lambda tp: tq.Topology(tp=2, coordinates={"tp": tp}), {"tp": 1}),
    "rate": lambda w: (
        lambda ratio, least: w.client.create_partition(
            f"odd-{next(_numbers)}", samples_per_insert=tq.SamplesPerInsert(ratio, least)
        ),
        {"ratio": 1.0, "least": 1},
    ),
}
BLOCKING: dict[str, Callable[[World], Call]] = {
    "Batch.get": lambda w: (w.batch().get, {"field": "x", "default": None}),
    "Batch.__getitem__": lambda w: (w.batch().__getitem__, {"field": "x"}),
    "Metadata.__setitem__": lambda w: (w.part.metadata.__setitem__, {"name": "a", "value": 1}),
    "Metadata.__getitem__": lambda w: (w.metadata().__getitem__, {"name": "a"}),
    "Metadata.__delitem__": lambda w: (w.metadata().__delitem__, {"name": "a"}),
    "tq.connect": lambda w: (
        tq.connect,
        {"address": w.client._state.address, "transport": "auto", "token": None, "tls": None, "timeout": 1},
    ),
    "tq.TLS": lambda w: (
        lambda ca, cert: tq.TLS(ca, cert, cert).credentials(),
        {"ca": __file__, "cert": None},
    ),
    "tq.Topology": lambda w: (
        tq.Topology,
        {
            **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "world_size"), 1),
            "rank": 0,
            "coordinates": None,
            "leader_acks": False,
        },
    ),
    "tq.topology.plan_replicas": lambda w: (
        tq.topology.plan_replicas,
        {**dict.fromkeys(("gpus_per_node", "nodes", "tp", "pp", "ep"), 1), "independent": True},
    ),
    "tq.SamplesPerInsert": lambda w: (tq.SamplesPerInsert, {"ratio": 1, "min_samples": 1, "error_buffer": None}),
    "tq.Sampler": lambda w: (lambda name, alpha: tq.Sampler(name, alpha=alpha), {"name": "fifo", "alpha": 1}),
    "tq.Random": lambda w: (tq.Random, {"seed": 0}),
    "tq.Prioritized": lambda w: (tq.Prioritized, {"tag": "a"}),
    "tq.GroupSampler": lambda w: (tq.GroupSampler, {"size": 1}),
    "tq.SeqlenBalanced": lambda w: (tq.SeqlenBalanced, {"field": "t", "groups": False}),
    "tq.Shared": lambda w: (
        lambda values, index: w.partition().put({"x": tq.Shared(values, index)}),
        {"values": [1], "index": [0]},
    ),
    "tq.Records": lambda w: (lambda values: w.partition().put({"x": tq.Records(values)}), {"values": [1]}),
    "StreamingDataset": lambda w: (StreamingDataset, {"consumer": w.consumer(), **SIZES, "transform": None}),
    "StreamingLoader": lambda w: (
        StreamingLoader,
        {
            **dict.fromkeys(("transform", "device", "pin_memory")),
            **SIZES,
            "consumer": w.consumer(),
            "prefetch": 1,
            "num_workers": 0,
        },
    ),
    "StreamingLoader.load_state_dict": lambda w: (StreamingLoader(w.consumer()).load_state_dict, {"state": {}}),
    "a loader's state": lambda w: (
        partial(load_state, StreamingLoader(w.consumer())),
        {"epoch": 1, "step": 1, "partition": "another"},
    ),
}
AWAITABLE: dict[str, Callable[[World], Call]] = {
    "Metadata.get": lambda w: (w.metadata().get, {"name": "a", "default": None}),
    "Metadata.delete": lambda w: (w.metadata().delete, {"names": ["a"]}),
}
UNHASHABLE = {"Batch.get", "Batch.__getitem__"} | {f"Metadata.{name}" for name in dir(dict)}
"""Mappings, that raise TypeError for a name that cannot be one of theirs."""


def odd_ones(name: str, call: Callable[[World], Call], world: World) -> list[str]:
    """Returns the arguments of a call that are answered otherwise than they should be."""
    found = []
    allowed = (*ALLOWED, TypeError) if name in UNHASHABLE else ALLOWED
    for argument in call(world)[1]:
        for label, odd in ODD.items():
            method, made_for = call(world)
            try:
                finish(method(**{**made_for, argument: odd()}), world)
            except allowed:
                continue
            except Exception as error:
                found.append(f"{argument}={label}: {type(error).__name__}: {error!s:.120}")
    return found


def finish(value: Any, world: World) -> None:
    """Waits for what was called, looks at what it yields, and gives back what it holds."""
    if isinstance(value, Awaitable):
        value = world.resolve(value)
    if isinstance(value, Iterator):
        finish(next(value), world)
        value.close()  # type: ignore[attr-defined]
    elif isinstance(value, AsyncIterator):
        finish(world.resolve(value.__anext__()), world)
        world.resolve(value.aclose())  # type: ignore[attr-defined]
    elif isinstance(value, tq.Writer | tq.aio.Writer):
        value.abort()
    elif isinstance(value, tq.Batch | tq.aio.Batch | tq.Permit | tq.aio.Permit | tq.Client):
        closed: Any = value.close()
        if isinstance(closed, Awaitable):
            world.resolve(closed)


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="256MiB") as running:
        yield running


@pytest.fixture(scope="module")
def blocking(shared_cluster: LocalCluster) -> Iterator[World]:
    with tq.connect(shared_cluster.address, timeout=2) as client:
        yield World(client, lambda value: value)


@pytest.fixture(scope="module")
def awaitable(shared_cluster: LocalCluster) -> Iterator[World]:
    with asyncio.Runner() as runner:

        async def wait(value: Awaitable[Any]) -> Any:
            return await value

        def resolve(value: Awaitable[Any]) -> Any:
            return runner.run(wait(value))

        client = resolve(tq.aio.connect(shared_cluster.address, timeout=2))
        yield World(client, resolve)
        resolve(client.close())


@pytest.mark.parametrize("name", [*CALLS, *BLOCKING])
def test_of_blocking_calls(blocking: World, name: str) -> None:
    assert odd_ones(name, {**CALLS, **BLOCKING}[name], blocking) == []


@pytest.mark.parametrize("name", [*CALLS, *AWAITABLE])
def test_of_awaitable_calls(awaitable: World, name: str) -> None:
    assert odd_ones(name, {**CALLS, **AWAITABLE}[name], awaitable) == []


def test_iterables_are_taken_whole_and_once(blocking: World) -> None:
    part = blocking.partition()
    ids = part.put({"x": [1, 2, 3, 4], "y": [5, 6, 7, 8]}, keys=list("abcd"), groups=["g", "g", 3, 4])
    assert part.consumer("c", fields=(name for name in ["y"])).claim(1, timeout=1).fields == ["y"]
    for fields in (np.array(["y"]), ("y",), (name for name in ["y"])):
        assert part.get(keys=(key for key in "ba"), fields=fields)["y"] == [6, 5]
    assert part.get((number for number in ids.tolist()[::-1]), fields=["x"])["x"] == [4, 3, 2, 1]
    assert part.clear(keys=(key for key in "a")).tolist() == ids[:1].tolist()
    assert part.clear(groups=(group for group in ["g", 3])).tolist() == ids[1:3].tolist()
    assert part.clear(number for number in ids.tolist()).tolist() == ids[3:].tolist()
    assert part.clear(number for number in []).tolist() == []
    assert blocking.client.create_partition(
        f"odd-{next(_numbers)}", consumers=(name for name in ["b", "a"])
    ).describe().counts.keys() == {"a", "b"}


def test_what_cannot_be_carried_is_named_by_its_argument(blocking: World) -> None:
    bad = {"k": [1, {"z": object()}]}
    for act in (
        lambda: blocking.part.metadata.update({"a b": bad}),
        lambda: blocking.part.shard(1).metadata.update({"a b": bad}),
        lambda: blocking.client.create_partition("never", metadata={"a b": bad}),
    ):
        with pytest.raises(tq.UnsupportedValue, match=r"^metadata\['a b'\]\.k\[1\]\.z: a object cannot be carried"):
            act()
    with pytest.raises(tq.UnsupportedValue, match=r"^to_buffer\.extra\.k\[1\]\.z: a object cannot be carried"):
        blocking.batch().to_buffer(bad)
    with pytest.raises(tq.InvalidArgument, match=r"^field 'a': torch\.qint8 is no dtype of torch that can be carried"):
        blocking.part.allocate(1, {"a": (torch.qint8, [1])})


def test_every_call_is_among_them() -> None:
    named = {**CALLS, **BLOCKING}
    for cls in (tq.Client, tq.Partition, tq.Consumer, tq.Batch, tq.Writer, tq.Permit, StreamingLoader):
        for name, method in inspect.getmembers(cls, inspect.isroutine):
            if (
                name[0] != "_"
                and method.__module__.startswith("tqclient")
                and len(inspect.signature(method).parameters) > 1
            ):
                assert f"{cls.__name__}.{name}" in named, name
