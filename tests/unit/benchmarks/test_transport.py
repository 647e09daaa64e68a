from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import xxhash

from benchmarks import transport
from benchmarks.main import main
from benchmarks.paths import Ends, Path, Setup
from benchmarks.payload import Payload, Shape, blank, check, digest
from benchmarks.workers import Worker, serve, stop_all
from tqclient.limits import KIB, MIB

SMALL = Shape(values=2, value_bytes=8 * KIB, block_rows=16, scattered_rows=3)


def test_the_table_is_about_what_it_says() -> None:
    sizes = [Shape().size_bytes(batch) for batch in ("large", "scattered", "small")]
    assert sizes == [256 * MIB, 4_096_000, 4096]
    names = [transport.operation(Shape(), batch, verb) for batch, verb in (("large", "put"), ("scattered", "get"))]
    assert names == ["64 × 4 MiB put", "1,000 × 4 KiB scattered get"]


def test_one_buffer_holds_every_batch() -> None:
    payload = Payload(SMALL, seed=1)
    assert (SMALL.block_offset, SMALL.small_offset, SMALL.buffer_bytes) == (16384, 81920, 86016)
    assert [payload.values(batch).shape for batch in ("large", "scattered", "small")] == [
        (2, 8192),
        (16, 4096),
        (1, 4096),
    ]
    ends = payload.buffer[16383], payload.buffer[16384], payload.buffer[81920]
    assert ends == (payload.large[1, -1], payload.block[0, 0], payload.small[0, 0])


def test_the_same_seed_gives_the_same_bytes() -> None:
    first, again, other = (Payload(SMALL, seed).buffer for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_each_put_and_each_get_starts_from_other_bytes_in_every_page() -> None:
    payload = Payload(SMALL, seed=1)
    before, received = payload.large.copy(), payload.large.copy().reshape(-1)
    payload.renew("large")
    blank(received)
    for changed in (payload.large, received):
        pages = before.reshape(-1, 4096) != changed.reshape(-1, 4096)
        assert pages.any(axis=1).tolist() == [True] * 4
    assert digest(payload.large) != digest(before)


def test_a_digest_is_of_the_rows_that_were_asked_for_in_their_order() -> None:
    payload = Payload(SMALL, seed=1)
    wanted = payload.block[5].tobytes() + payload.block[2].tobytes()
    assert payload.digest("scattered", np.array([5, 2])) == xxhash.xxh3_64_intdigest(wanted)
    check(payload.block[[5, 2]], xxhash.xxh3_64_intdigest(wanted), "rows")
    with pytest.raises(RuntimeError, match="rows: what was read differs"):
        check(payload.block[[2, 5]], xxhash.xxh3_64_intdigest(wanted), "rows")


class FakeWorker:
    """Answers as an end of a path does, with times that it was given."""

    def __init__(self, name: str, seconds: float, calls: list[tuple[str, str]], fails_at: int | None = None) -> None:
        self._name, self._seconds, self._calls, self._fails_at = name, seconds, calls, fails_at
        self.puts = 0
        self.dropped: list[Any] = []

    def call(self, command: str, *arguments: Any) -> Any:
        if command == "put":
            self.puts += 1
            if self.puts == self._fails_at:
                raise OSError("cable cut")
            self._calls.append((self._name, arguments[0]))
            return {"whole": self._seconds, "part": self._seconds / 2}, self.puts
        if command == "get":
            _, token, rows, expected = arguments
            assert expected == "digest"
            assert (token == "block") == (rows is not None)
            return {"whole": self._seconds}
        if command == "drop":
            self.dropped.append(arguments[0])
        return {"load": "block", "digest": "digest"}.get(command)


def fake_path(name: str, worker: FakeWorker) -> Path:
    @contextmanager
    def start(setup: Setup) -> Iterator[Ends]:
        assert setup.shape is SMALL
        yield Ends(worker, worker)  # type: ignore[arg-type]

    return Path(name, start)


def test_paths_take_turns_and_are_set_beside_the_raw_engine() -> None:
    calls: list[tuple[str, str]] = []
    ours, raw = FakeWorker("ours", 0.002, calls), FakeWorker("raw engine", 0.004, calls)
    result = transport.run([fake_path("ours", ours), fake_path("raw engine", raw)], repeats=2, shape=SMALL)
    assert not result.failures
    # Two rounds of warm-up and two that count: one large put and ten small ones in each, of each path, by turns.
    assert len(calls) == 2 * 4 * 11
    assert [{name for name, _ in calls[at : at + 2]} for at in range(0, len(calls), 2)] == [{"ours", "raw engine"}] * 44
    assert {calls[at][0] for at in range(0, len(calls), 2)} == {"ours", "raw engine"}
    assert ours.dropped == list(range(1, 45))
    rows = [(row.operation, row.path, row.timed, row.times.count, row.speed) for row in result.rows]
    assert rows[:6] == [
        ("2 × 8 KiB put", "ours", "whole", 2, 2.0),
        ("2 × 8 KiB put", "ours", "part", 2, 4.0),
        ("2 × 8 KiB put", "raw engine", "whole", 2, 1.0),
        ("2 × 8 KiB put", "raw engine", "part", 2, 2.0),
        ("2 × 8 KiB get", "ours", "whole", 2, 2.0),
        ("2 × 8 KiB get", "raw engine", "whole", 2, 1.0),
    ]
    assert [(row.operation, row.times.count) for row in result.rows[6::2]] == [
        ("3 × 4 KiB scattered get", 6),
        ("4 KiB put", 20),
        ("4 KiB put", 20),
        ("4 KiB get", 20),
    ]
    assert result.rows[0].gigabytes_per_second == pytest.approx(16384 / 0.002 / 1e9)


def test_a_speed_is_compared_turn_by_turn() -> None:
    name = transport.operation(SMALL, "large", "put")
    times = {(name, "ours", "whole"): [0.001, 0.004, 0.002], (name, "raw engine", "whole"): [0.002, 0.012, 0.008]}
    rows = transport._rows(SMALL, times, ["ours", "raw engine"])
    assert [row.speed for row in rows] == [3.0, 1.0]


def test_a_path_that_fails_has_its_reason_for_a_result_and_the_others_go_on() -> None:
    @contextmanager
    def cannot_start(setup: Setup) -> Iterator[Ends]:
        raise ImportError("no such library")
        yield

    calls: list[tuple[str, str]] = []
    good, bad = FakeWorker("good", 0.001, calls), FakeWorker("bad", 0.001, calls, fails_at=13)
    paths = [Path("absent", cannot_start), fake_path("bad", bad), fake_path("good", good)]
    result = transport.run(paths, repeats=1, shape=SMALL)
    assert result.failures == {"absent": "ImportError: no such library", "bad": "OSError: cable cut"}
    assert {row.path for row in result.rows} == {"good"}
    assert {row.speed for row in result.rows} == {None}
    assert (bad.puts, good.puts) == (13, 33)


def test_paths_bring_the_bytes_without_registering_memory_again() -> None:
    paths = [path for path in transport.PATHS if path.name not in {"shm", "grpc"}]  # mooncake's code, two more times
    result = transport.run(paths, repeats=1, arena="64MiB", staging="1MiB", shape=SMALL)
    assert result.failures == {}
    timed: dict[str, list[str]] = {}
    for row in result.rows:
        if row.operation in {"2 × 8 KiB put", "3 × 4 KiB scattered get"}:
            timed.setdefault(row.path, []).append(row.timed)
    assert timed == {
        "memcpy": ["np.copyto", "np.take"],
        "mooncake": ["API call", "transport", "transport, target filled", "API call", "transport"],
        "raw engine": ["one transfer", "one batch, an item a row", "an async operation a row"],
        "Mooncake Store": ["batch_put_from", "batch_get_into", "get_into_ranges of one key"],
    }
    assert result.registrations == {"mooncake producer": (1, 1), "mooncake consumer": (1, 1), "node": (1, 1)}


def test_an_unknown_path_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SystemExit, match=r"no path carrier pigeon; there are memcpy, shm, mooncake, grpc, raw engine"):
        main(["transport", "memcpy", "carrier pigeon"])


def ends_at_once(pipe: Any) -> None:
    raise SystemExit(3)


def cannot_begin(pipe: Any) -> None:
    raise ValueError("not today")


def adds(pipe: Any) -> None:
    serve(pipe, {"add": lambda a, b: a + b})


def test_a_worker_tells_why_it_does_not_answer() -> None:
    workers = [Worker(cannot_begin), Worker(ends_at_once), Worker(adds)]
    try:
        with pytest.raises(ValueError, match="not today"):
            workers[0].call("add", 1, 2)
        with pytest.raises(RuntimeError, match="ended with status 3"):
            workers[1].call("add", 1, 2)
        with pytest.raises(TypeError):
            workers[2].call("add", "1", 2)
        assert workers[2].call("add", 1, 2) == 3
        workers[2].check_alive()
        with pytest.raises(RuntimeError, match="ended with status 3"):
            workers[1].check_alive()
    finally:
        stop_all(workers)
