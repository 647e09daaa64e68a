"""Whatever is put comes back, however it is read: random columns, puts and reads over real daemons."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
import torch

import tqclient as tq
from tests.process.random_columns import Kind, clipped, key_of, value_at
from tests.unit.codec.values import identical, rows_of
from tqserver.local import LocalCluster

HISTORIES: Final = 50
TRANSPORTS: Final = ("auto", "grpc", "mooncake")
SHARES: Final = (0, 0.1, 0.5, 0.9, 1)

Range = Callable[[int], tuple[int, int]]
"""The length of a row → where a range of it starts and stops."""


class History:
    """One partition, what was put in it, and what must come of it."""

    def __init__(self, clients: Sequence[tq.Client], seed: int) -> None:
        self.choose = choose = random.Random(seed)
        self.clients = clients
        self.seed = seed
        self.name = f"random/{seed}"
        replicas = choose.choice([1, 1, 2])
        self.client().create_partition(self.name, consumers=["c"], replicas=replicas, max_attempts=1000)
        self.fields = {f"f{index}": Kind(choose) for index in range(choose.randint(1, 4))}
        self.late = {f"late.{index}": Kind(choose) for index in range(choose.randint(0, 2))}
        self.rows: dict[int, dict[str, Any]] = {}
        self.keys: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"seed {self.seed}: {self.fields}, then {self.late}"

    def client(self) -> tq.Client:
        return self.choose.choice(self.clients)

    def run(self) -> None:
        rows = self.choose.choice([1, 2, 3, 8, 8, 17, 70])
        for index in range(self.choose.choice([1, 3, 9, 20, 40])):
            self.put(index, rows if self.choose.random() < 0.85 else self.choose.randint(1, 20))
        self.add_columns()
        for _ in range(self.choose.randint(3, 10)):
            self.choose.choice([self.get, self.get, self.get, self.claim, self.clear, self.put_again])()
        self.client().delete_partition(self.name)

    def columns(self, fields: dict[str, Kind], rows: int) -> dict[str, Any]:
        return {name: kind.column(self.choose, rows) for name, kind in fields.items()}

    def keep(self, ids: Sequence[int], columns: dict[str, Any]) -> None:
        for name, column in columns.items():
            for sample, value in zip(ids, rows_of(column), strict=True):
                self.rows.setdefault(int(sample), {})[name] = value

    def put(self, index: int, rows: int) -> None:
        columns, keys = self.columns(self.fields, rows), [f"{index}/{row}" for row in range(rows)]
        ids = self.client().partition(self.name).put(columns, keys=keys, groups=[f"group {index}"] * rows)
        self.keep(ids, columns)
        self.keys.update(zip(ids.tolist(), keys, strict=True))

    def add_columns(self) -> None:
        """Another stage adds to the rows, in an order and by pieces of its own."""
        for name, kind in self.late.items():
            left = list(self.rows)
            if self.choose.random() < 0.5:
                self.choose.shuffle(left)
            while left:
                count = min(self.choose.choice([1, 5, len(left)]), len(left))
                columns = {name: kind.column(self.choose, count)}
                self.client().partition(self.name).put(columns, ids=left[:count])
                self.keep(left[:count], columns)
                left = left[count:]

    def clear(self) -> None:
        gone = self.choose.sample(list(self.rows), min(len(self.rows) - 1, 4))
        if gone:
            self.client().partition(self.name).clear(ids=gone)
        for sample in gone:
            del self.rows[sample]

    def put_again(self) -> None:
        """Other values, for the same keys."""
        sample = self.choose.choice(list(self.rows))
        columns = self.columns(self.fields, 1)
        ids = self.client().partition(self.name).put(columns, keys=[self.keys[sample]], upsert=True)
        assert ids.tolist() == [sample]
        self.keep(ids, columns)

    def read(self) -> tuple[list[str], dict[str, Any], dict[str, dict[str, Range]]]:
        """Chooses fields, ranges as `get` and `claim` take them, and the same by field and path within it."""
        every = {**self.fields, **self.late}
        fields = self.choose.sample(list(every), self.choose.randint(1, len(every)))
        paths = [path for name in fields for path in every[name].ranged(name)]
        wanted: dict[str, Any] = {}
        expected: dict[str, dict[str, Range]] = {name: {} for name in fields}
        for path in self.choose.sample(paths, min(len(paths), self.choose.choice([0, 0, 1, 2]))):
            low, high = sorted(self.choose.choices(SHARES, k=2))
            name = key_of(every, path)
            if self.choose.random() < 0.3:
                low, high = 0, self.choose.randint(0, 1)
                wanted[path] = (0, None if high else 0)
            else:
                wanted[path] = lambda lengths, low=low, high=high: [(int(n * low), int(n * high)) for n in lengths]
            expected[name][path[len(name) + 1 :]] = lambda n, low=low, high=high: (int(n * low), int(n * high))  # type: ignore[misc]
        return fields, wanted, expected

    def get(self) -> None:
        ids = list(self.rows)
        if self.choose.random() < 0.6:
            self.choose.shuffle(ids)
        ids = ids[: self.choose.choice([1, 3, len(ids), self.choose.randint(1, len(ids))])]
        fields, ranges, expected = self.read()
        part, copy = self.client().partition(self.name), self.choose.random() < 0.6
        if self.choose.random() < 0.3:
            batch = part.get(keys=[self.keys[sample] for sample in ids], fields=fields, ranges=ranges, copy=copy)
        else:
            batch = part.get(ids, fields=fields, ranges=ranges, copy=copy)
        assert batch.ids.tolist() == ids
        self.check(batch, expected)

    def claim(self) -> None:
        fields, ranges, expected = self.read()
        sampler = self.choose.choice([None, tq.Fifo(), tq.Lifo(), tq.Random(self.seed)])
        consumer = self.client().partition(self.name).consumer("c", fields=fields, sampler=sampler)
        count = self.choose.randint(1, len(self.rows))
        batch = consumer.claim(count, ranges=ranges, copy=self.choose.random() < 0.6, timeout=10)
        assert len(batch.ids) == count
        self.check(batch, expected)
        batch.release()

    def check(self, batch: tq.Batch, expected: dict[str, dict[str, Range]]) -> None:
        assert sorted(batch.fields) == sorted(expected)
        assert batch.keys == [self.keys[sample] for sample in batch.ids.tolist()]
        for name, ranges in expected.items():
            values = [self.rows[sample][name] for sample in batch.ids.tolist()]
            for path, ends in ranges.items():
                wanted = [slice(*ends(len(value_at(value, path)))) for value in values]
                values = [clipped(value, path, each) for value, each in zip(values, wanted, strict=True)]
            assert identical(values, batch.list(name)), name
            whole = batch[name]
            if isinstance(whole, torch.Tensor):
                assert identical(values, list(whole.unbind())), name
        batch.verify()


@pytest.fixture(scope="module")
def clients() -> Iterator[list[tq.Client]]:
    with LocalCluster(storage_nodes=2, arena="256MiB", mooncake="on") as cluster:
        opened = [tq.connect(cluster.address, timeout=30, transport=transport) for transport in TRANSPORTS]
        yield opened
        for client in opened:
            client.close()


def run_seeds(clients: list[tq.Client], first: int, histories: int) -> None:
    for seed in range(first, first + histories):
        history = History(clients, seed)
        try:
            history.run()
        except BaseException:
            sys.stdout.write(f"{history}\n")
            raise


@pytest.mark.timeout(300)
def test_random_histories(clients: list[tq.Client]) -> None:
    run_seeds(clients, 0, HISTORIES)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_long_range_of_seeds(clients: list[tq.Client], seed: int, rounds: int | None) -> None:
    """`--seed` and `--rounds=1` repeat the one that failed, which is printed."""
    run_seeds(clients, seed, rounds or 2000)
