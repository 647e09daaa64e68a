from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.compare import END_TO_END, GET, PUT, Failure, Plan, Result
from benchmarks.machine import Usage
from benchmarks.peers import Peer

PLAIN, WRITTEN = 11, 22
CALLS = list[tuple[Any, ...]]


class FakeEnd:
    """A producer and a consumer in one: answers as those of a peer do, and keeps what it was told."""

    def __init__(self, peer: str, calls: CALLS, broken: dict[str, str]) -> None:
        self._peer, self._calls, self._broken = peer, calls, broken
        self._clock = 0.0
        self._pending: Any = None
        self.cpu_s = 0.0
        self.bursts: list[tuple[Any, ...]] = []

    def call(self, command: str, *arguments: Any) -> Any:
        self._calls.append((self._peer, command, *arguments))
        if command == "stamp":
            return PLAIN, WRITTEN
        if command == "digest":
            return WRITTEN if self._pending else PLAIN
        if arguments and self._broken.get(command) == arguments[0]:
            raise RuntimeError(f"{command} broke")
        if command == "put":
            self.cpu_s += 0.25
            return self._next(0.003)
        if command == "take":
            self._pending = False
            return self._next(0.002)
        return None

    def send(self, command: str, *arguments: Any) -> None:
        self._calls.append((self._peer, f"send {command}", *arguments))
        if command == "burst":
            self.bursts.append(arguments)
        else:
            self._way, self._pending = arguments

    def receive(self) -> Any:
        if self.bursts:
            _, _, threads, _ = self.bursts.pop()
            return 2.0, [0.001] * (100 * threads)
        if self._broken.get("take") == self._way:
            raise RuntimeError("take broke")
        return self._clock - 1.0, self._clock + 0.004

    def _next(self, seconds: float) -> tuple[float, float]:
        start, self._clock = self._clock, self._clock + seconds
        return start, self._clock


class FakeEnds:
    def __init__(self, peer: Peer, end: FakeEnd, producers: int) -> None:
        self.peer, self.sources, self.target, self._end = peer, [end] * producers, end, end

    def usage(self) -> dict[str, Usage]:
        return {"producer": Usage(self._end.cpu_s, 1 << 20, 0)}


class Peers:
    """Opens fakes; some are broken."""

    def __init__(self, **broken: dict[str, str]) -> None:
        self.calls: CALLS = []
        self.closed: list[str] = []
        self._broken = broken

    @contextmanager
    def open(self, peer: Peer, setup: Any, *, producers: int, consumer: bool) -> Iterator[Any]:
        broken = self._broken.get(peer.name, {})
        if reason := broken.get("open"):
            raise RuntimeError(reason)
        yield FakeEnds(peer, FakeEnd(peer.name, self.calls, broken), producers)
        self.closed.append(peer.name)


A = Peer("a", "", ("x", "y"))
B = Peer("b", "", ("z",))


def run(peers: Peers, names: tuple[str, ...] = ("small",), repeats: int = 2) -> Result:
    return compare.run(Plan(names, [A, B], repeats, scale="small"), peers.open)


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SETTLE_SECONDS", 0.0)


def test_the_ways_of_all_peers_take_turns() -> None:
    peers = Peers()
    result = run(peers)
    assert result.failures == []
    puts = [(peer, way) for peer, command, way, *_ in filter(lambda call: call[1] == "put", peers.calls)]
    turns = [(lane, len(list(batches))) for lane, batches in itertools.groupby(puts)]
    assert [lane for lane, _ in turns] == [
        *[("a", "x"), ("a", "y"), ("b", "z")],
        *[("a", "y"), ("b", "z"), ("a", "x")],
        *[("b", "z"), ("a", "x"), ("a", "y")],
        *[("a", "x"), ("a", "y"), ("b", "z")],
        *[("a", "y"), ("b", "z"), ("a", "x")],
    ]
    # One to a consumer that waits, and one for put and get alone. From the second turn on, one before that warms up.
    assert [batches for _, batches in turns] == [2] * 3 + [3] * 12
    assert peers.closed == ["a", "b"]


def test_a_turn_warms_up_before_it_is_timed() -> None:
    peers = Peers()
    run(peers)
    second = [call[1] for call in peers.calls if call[0] == "b"][15:38]
    assert second == [
        *["stamp"],
        *["prepare", "put", "take", "digest", "drop", "drop"],
        *["collect", "collect"],
        *["prepare", "send take", "put", "digest", "drop", "drop"],
        *["prepare", "put", "take", "digest", "drop", "drop"],
        *["stamp", "prepare"],
    ]


def test_a_consumer_waits_before_the_producer_puts_and_bytes_are_compared_after() -> None:
    peers = Peers()
    run(peers)
    first = [call[1] for call in peers.calls if call[0] == "b"][:15]
    assert first == [
        *["stamp", "collect", "collect", "prepare", "send take", "put", "digest", "drop", "drop"],
        *["prepare", "put", "take", "digest", "drop", "drop"],
    ]


def test_every_operation_has_its_cold_and_its_warm_times() -> None:
    result = run(Peers())
    assert [(row.peer, row.way, row.operation) for row in result.rows] == [
        (peer, way, operation)
        for peer, way in (("a", "x"), ("a", "y"), ("b", "z"))
        for operation in (END_TO_END, PUT, GET)
    ]
    assert {row.times.count for row in result.rows} == {2}
    # From the start of the put to the end of the take, by the processes' own clocks: 3 ms to put, 4 more to take.
    assert {row.operation: round(row.times.median_ms, 6) for row in result.rows} == {
        END_TO_END: 7.0,
        PUT: 3.0,
        GET: 2.0,
    }
    assert {round(row.cold_ms, 6) for row in result.rows if row.operation == END_TO_END} == {7.0}
    assert {(cost.part, cost.cpu_ms, cost.rss_peak_bytes) for cost in result.costs} == {("producer", 250.0, 1 << 20)}


def test_a_rollout_is_taken_with_what_a_critic_wrote_back() -> None:
    peers = Peers()
    result = run(peers, ("rollout",))
    assert result.failures == []
    assert ("b", "send take", "z", True) in peers.calls
    assert ("b", "take", "z", False) in peers.calls


def test_a_peer_that_cannot_start_has_that_for_a_result() -> None:
    result = run(Peers(a={"open": "no such program"}))
    assert result.failures == [Failure("small", "a", None, "no such program")]
    assert {row.peer for row in result.rows} == {"b"}


def test_bytes_that_differ_are_a_failure_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEnd, "_next", lambda self, seconds: (0.0, seconds))
    answer = FakeEnd.call

    def corrupt(self: FakeEnd, command: str, *arguments: Any) -> Any:
        return 99 if (command, *arguments) == ("digest", "y") else answer(self, command, *arguments)

    monkeypatch.setattr(FakeEnd, "call", corrupt)
    result = run(Peers())
    assert result.failures == [Failure("small", "a", "y", "what was read differs from what was put")]
    assert [(row.peer, row.way) for row in result.rows[::3]] == [("a", "x"), ("b", "z")]


def test_a_take_that_fails_ends_one_way_and_a_put_that_fails_all_of_them() -> None:
    taken = run(Peers(a={"take": "y"}))
    assert taken.failures == [Failure("small", "a", "y", "take broke")]
    assert [(row.peer, row.way) for row in taken.rows[::3]] == [("a", "x"), ("b", "z")]
    peers = Peers(a={"put": "y"})
    put = run(peers)
    # The consumer may wait for ever now: what it answers next belongs to no question.
    assert put.failures == [Failure("small", "a", None, "RuntimeError: put broke")]
    assert {row.peer for row in put.rows} == {"b"}
    assert peers.closed == ["a", "b"]


def test_rates_are_of_all_producers_together() -> None:
    peers = Peers()
    result = run(peers, ("rows",), repeats=3)
    assert result.failures == []
    found = [(rate.peer, rate.way, rate.producers, rate.calls_per_s, rate.times.count) for rate in result.rates]
    # 100 calls of each producer in the 2 s that a burst took; three bursts count, the first does not.
    assert sorted(found) == [
        ("a", "x", 1, 50.0, 300),
        ("a", "x", 2, 100.0, 600),
        ("b", "z", 1, 50.0, 300),
        ("b", "z", 2, 100.0, 600),
    ]
    firsts = [call[3] for call in peers.calls if call[1] == "send burst"]
    assert len(set(firsts)) == len(firsts)
