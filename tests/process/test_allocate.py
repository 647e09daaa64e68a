"""Putting without a copy: what is filled in is what is read, and nobody changes it afterwards."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

import tqclient as tq
from tests.harness.supervisor import wait_until
from tqclient import driver
from tqclient import session as session_module
from tqclient.transport import moving
from tqserver.local import LocalCluster

ROWS = 8
LENGTHS = [300, 0, 7000, 1, 64, 900, 2, 4097]
SPEC: dict[str, Any] = {
    "dense": ("int64", [1000]),
    "scalar": (torch.float32, ()),
    "ragged": ("bfloat16", [[length, 3] for length in LENGTHS]),
    "mm": {"pixels": ("float32", [[length, 16] for length in LENGTHS]), "grid": ("int64", [1, 3])},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="32MiB", session_lease=2.0) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(cluster.address, transport="shm", timeout=20) as client:
        yield client


@pytest.fixture
def part(client: tq.Client, request: pytest.FixtureRequest) -> Iterator[tq.Partition]:
    yield client.create_partition(request.node.name)
    client.delete_partition(request.node.name)


def values(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "dense": torch.randint(1 << 40, (ROWS, 1000), generator=generator),
        "scalar": torch.rand(ROWS, generator=generator),
        "ragged": [torch.rand(length, 3, generator=generator).bfloat16() for length in LENGTHS],
        "mm": {
            "pixels": [torch.rand(length, 16, generator=generator) for length in LENGTHS],
            "grid": torch.randint(99, (ROWS, 1, 3), generator=generator),
        },
    }


def fill(target: Any, source: Any) -> None:
    if isinstance(source, dict):
        for key, value in source.items():
            fill(target[key], value)
    elif isinstance(source, list):
        for row, value in zip(target, source, strict=True):
            row.copy_(value)
    else:
        target.copy_(source)


def check(batch: Any, expected: dict[str, Any]) -> None:
    assert torch.equal(batch["dense"], expected["dense"])
    assert torch.equal(batch["scalar"], expected["scalar"])
    assert batch["ragged"].dtype == torch.bfloat16
    assert all(map(torch.equal, batch.list("ragged"), expected["ragged"]))
    rows = batch.list("mm")
    assert all(torch.equal(row["pixels"], value) for row, value in zip(rows, expected["mm"]["pixels"], strict=True))
    assert torch.equal(batch["mm"]["grid"], expected["mm"]["grid"])


@pytest.mark.parametrize(("transport", "in_arena"), [("shm", True), ("grpc", False)])
def test_what_is_filled_in_is_what_is_read(cluster: LocalCluster, transport: str, in_arena: bool) -> None:
    with tq.connect(cluster.address, transport=transport, timeout=20) as client:
        part = client.create_partition(f"filled-{transport}")
        keys = [f"key-{row}" for row in range(ROWS)]
        with part.allocate(ROWS, SPEC, keys=keys, groups=["g"] * ROWS, weight_version=3, tags={"a": 1}) as writer:
            assert list(writer) == list(SPEC)
            assert writer.in_arena is in_arena
            assert writer["dense"].shape == (ROWS, 1000)
            assert [row.shape for row in writer["ragged"]] == [(length, 3) for length in LENGTHS]
            fill(writer, values())
            ids = writer.commit()
            assert writer.commit().tolist() == ids.tolist()
        assert part.describe().samples == ROWS
        with part.get(ids, copy=False) as batch:
            batch.verify()
            check(batch, values())
            assert (batch.keys, batch.groups[0], batch.tags[0]) == (keys, "g", {"a": 1})
            assert batch.weight_versions.tolist() == [[3, 3]] * ROWS
        check(part.get(keys=keys), values())
        check(part.consumer("c").claim(ROWS, timeout=5), values())
        # The same columns as a put makes, so that both go into one partition.
        check(part.get(part.put(values(1))), values(1))
        client.delete_partition(part.name)


def test_a_store_that_comes_late_reaches_nobody(part: tq.Partition) -> None:
    writer = part.allocate(ROWS, SPEC)
    fill(writer, values())
    view = writer["mm"]["pixels"][2][5]
    ids = writer.commit()
    fill(writer, values(1))
    view.fill_(-1)
    assert (view == -1).all()
    with part.get(ids, copy=False) as batch:
        batch.verify()
        check(batch, values())
    del writer
    gc.collect()
    view.fill_(-2)  # the tensor's memory outlives the writer
    part.put(values(2))
    check(part.get(ids), values())


def test_a_store_that_races_with_the_commit_is_stored_or_not(part: tq.Partition) -> None:
    """Whatever of it was in time is in the checksum; what is stored never changes afterwards."""
    done = threading.Event()
    current: list[torch.Tensor] = []

    def scribble() -> None:
        while not done.is_set():
            for tensor in current:
                tensor.add_(1)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(30):
            writer = part.allocate(4, {"x": ("int64", [50_000])})
            writer["x"].zero_()
            current[:] = [writer["x"]]
            ids = writer.commit()
            first = part.get(ids)["x"]
            with part.get(ids, copy=False) as batch:
                batch.verify()
                assert torch.equal(batch["x"], first)
            part.clear(ids)
    finally:
        done.set()
        thread.join()


def test_neighbours_on_the_same_pages_write_on(part: tq.Partition) -> None:
    """Small rows share pages with others of this client, which are put while those are out on loan."""
    writers = [part.allocate(1, {"x": ("int64", [40])}) for _ in range(20)]
    assert all(writer.in_arena for writer in writers)
    put = [part.put({"x": torch.full((1, 40), number)}) for number in range(100, 120)]
    for number, writer in enumerate(writers):
        writer["x"].fill_(number)
    filled = [writer.commit() for writer in reversed(writers)][::-1]
    for ids, number in zip([*filled, *put], [*range(20), *range(100, 120)], strict=True):
        assert part.get(ids)["x"].tolist() == [[number] * 40]


@pytest.mark.parametrize("how", ["abort", "leave", "raise", "forget"])
def test_what_is_not_committed_is_given_back(part: tq.Partition, client: tq.Client, how: str) -> None:
    spec = {"x": ("uint8", [6 << 20])}
    for turn in range(10):  # 60 MiB, in an arena of 32
        writer = part.allocate(1, spec, timeout=10)
        writer["x"].fill_(turn)
        if how == "abort":
            writer.abort()
            writer.abort()
            with pytest.raises(tq.InvalidArgument, match="aborted"):
                writer.commit()
        elif how == "leave":
            with writer:
                pass
        elif how == "raise":
            with pytest.raises(ZeroDivisionError), writer:
                _ = 1 / 0
        else:
            kept = writer["x"]
            del writer
            gc.collect()
            kept.fill_(7)
    assert part.describe().samples == 0
    ids = part.put({"x": torch.arange(6 << 20).to(torch.uint8)[None]}, timeout=10)
    assert torch.equal(part.get(ids)["x"][0], torch.arange(6 << 20).to(torch.uint8))


def test_a_commit_that_found_no_room_can_be_repeated(client: tq.Client) -> None:
    part = client.create_partition("limited", capacity_samples=ROWS)
    others = part.put({"dense": torch.zeros(ROWS, 1000, dtype=torch.int64)})
    with part.allocate(ROWS, {"dense": SPEC["dense"]}) as writer:
        writer["dense"].copy_(values()["dense"])
        for _ in range(2):
            with pytest.raises(tq.BackpressureTimeout):
                writer.commit(timeout=0.2)
        part.clear(others)
        ids = writer.commit()
    assert torch.equal(part.get(ids)["dense"], values()["dense"])
    client.delete_partition("limited")


def test_keys_that_exist(part: tq.Partition) -> None:
    first = part.put({"x": torch.arange(12).reshape(3, 4)}, keys=["a", "b", "c"])
    with part.allocate(3, {"x": ("int64", [4])}, keys=["a", "b", "c"]) as writer:
        writer["x"].copy_(torch.arange(12).reshape(3, 4))
        assert writer.commit().tolist() == first.tolist()  # the same bytes: a repeated put
    with part.allocate(1, {"x": ("int64", [4])}, keys=["b"]) as writer:
        writer["x"].fill_(9)
        with pytest.raises(tq.DuplicateKey, match=r"row 0 has the key of sample .* but other bytes"):
            writer.commit()


def test_a_place_that_is_gone_with_its_session(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        tq.connect(cluster.address, transport="shm", timeout=20) as client,
        tq.connect(cluster.address, timeout=20) as onlooker,
    ):
        part = client.create_partition("gone")
        onlooker.partition("gone")  # its session is open by now
        beat, state, live = session_module.Heartbeat._work, client._state, onlooker.describe().sessions
        with part.allocate(1, {"x": ("int64", [5000])}) as writer:
            writer["x"].fill_(1)
            with monkeypatch.context() as patch:
                patch.setattr(
                    session_module.Heartbeat, "_work", lambda self: None if self._state is state else beat(self)
                )
                wait_until(lambda: onlooker.describe().sessions < live, what="the session ends")
            with pytest.raises(tq.LeaseExpired, match=r"nothing was stored\. Allocate again"):
                writer.commit()
            with pytest.raises(tq.InvalidArgument, match="aborted"):
                writer.commit()
        assert part.describe().samples == 0
        with part.allocate(1, {"x": ("int64", [5000])}) as writer:
            writer["x"].fill_(2)
            ids = writer.commit()
        assert (part.get(ids)["x"] == 2).all()


def test_an_older_kernel_copies(part: tq.Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(moving, "_move", refuse)
    with part.allocate(ROWS, SPEC) as writer:
        assert not writer.in_arena
        fill(writer, values())
        check(part.get(writer.commit()), values())


def test_no_room(part: tq.Partition) -> None:
    with pytest.raises(tq.StorageFull):
        part.allocate(1, {"x": ("uint8", [40 << 20])}, timeout=3)
    with pytest.raises(tq.InvalidArgument, match="more than one block may have"):
        part.allocate(2, {"x": ("uint8", [1 << 30])})


@pytest.mark.parametrize(
    ("rows", "spec", "message"),
    [
        (0, SPEC, "rows=0: expected an int of at least 1"),
        (True, SPEC, "rows=True"),
        (1, {}, "expected a mapping of fields"),
        (1, {"x": "float32"}, "field 'x': expected \\(dtype, shape\\)"),
        (1, {"x": ("float33", [1])}, "field 'x': 'float33' is no dtype"),
        (1, {"x": ("float32", 5)}, "field 'x': expected a shape"),
        (1, {"x": ("float32", [-1])}, "field 'x': \\[-1\\] is no shape"),
        (2, {"x": ("float32", [[1]])}, "field 'x': 1 shapes for 2 rows"),
        (2, {"m": {"x": ("float32", [[1, 2], [1, 3]])}}, "field 'm.x', row 1: shape \\[1, 3\\].*row 0 is \\[1, 2\\]"),
        (1, {"m": {}}, "spec of m: expected a mapping"),
        (2, {"x": ("float32", [[2**62], [2**62]])}, "field 'x': .* are more than one block may have"),
        (1, {"m": {"x": ("float32", [2**40, 2**40])}}, "field 'm.x': .*: allocate fewer rows at once"),
        (1, {"x": ("uint8", [2**63, 0])}, "field 'x': .* are more than one block may have"),
    ],
)
def test_a_spec_that_does_not_say_what_it_must(part: tq.Partition, rows: Any, spec: Any, message: str) -> None:
    with pytest.raises(tq.InvalidArgument, match=message):
        part.allocate(rows, spec)


def test_it_must_suit_the_partition(part: tq.Partition) -> None:
    part.put({"x": torch.zeros(1, 3)})
    with pytest.raises(tq.SchemaMismatch, match="'x'"):
        part.allocate(1, {"x": ("int64", [3])})
    with pytest.raises(tq.InvalidArgument, match="keys"):
        part.allocate(1, {"x": ("float32", [3])}, keys=["a", "b"])


def test_async(cluster: LocalCluster) -> None:
    async def run() -> None:
        async with tq.aio.connect(cluster.address, transport="shm", timeout=20) as client:
            part = await client.create_partition("async-writer")
            async with part.allocate(ROWS, SPEC) as writer:
                fill(writer, values())
                ids = await writer.commit()
            check(await part.get(ids), values())
            aborted = await part.allocate(ROWS, SPEC)
            aborted.abort()
            await client.delete_partition("async-writer")

    asyncio.run(run())


def check_all(part: tq.Partition, expected: dict[str, int]) -> None:
    """Every row that was acknowledged is there, as it was filled in or put."""
    for key, value in expected.items():
        assert (part.get(keys=[key])["x"] == value).all(), key


def test_commits_that_are_cancelled(cluster: LocalCluster) -> None:
    """Whether they were in time or not: their room is nobody else's."""
    timing = random.Random(1)

    async def run() -> None:
        async with tq.aio.connect(cluster.address, transport="shm", timeout=20) as client:
            part = await client.create_partition("cancelled")
            expected: dict[str, int] = {}
            for number in range(60):
                key = f"k{number}"
                async with part.allocate(1, {"x": ("int64", [64])}, keys=[key]) as writer:
                    writer["x"].fill_(number)
                    task = asyncio.ensure_future(writer.commit())
                    await asyncio.sleep(timing.uniform(0, 0.004))
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                with suppress(tq.SampleNotFound):
                    await part.get(keys=[key])
                    expected[key] = number
                await part.put({"x": torch.full((1, 64), -number)}, keys=[f"o{number}"])
                expected[f"o{number}"] = -number
            for key, value in expected.items():
                assert ((await part.get(keys=[key]))["x"] == value).all(), key
            await client.delete_partition("cancelled")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("step", "before", "stored"), [(1, True, False), (1, False, False), (2, True, False), (2, False, True)]
)
def test_a_commit_that_is_interrupted(
    part: tq.Partition, monkeypatch: pytest.MonkeyPatch, step: int, before: bool, stored: bool
) -> None:
    """Ctrl-C before, or at the end of, a step of a commit, and the caller leaves: takes the bytes back, commits."""
    perform, left = driver._perform, step

    def interrupt(effect: Any, stubs: Any) -> Any:
        nonlocal left
        if threading.current_thread() is not threading.main_thread():  # a heartbeat, which no Ctrl-C interrupts
            return perform(effect, stubs)
        left -= 1
        reply = None if before and left == 0 else perform(effect, stubs)
        if left == 0:
            raise KeyboardInterrupt
        return reply

    with suppress(KeyboardInterrupt), part.allocate(1, {"x": ("int64", [64])}, keys=["k"]) as writer:
        writer["x"].fill_(1)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "_perform", interrupt)
            writer.commit()
    assert left == 0
    for other in range(3):
        part.put({"x": torch.full((1, 64), other)}, keys=[f"o{other}"])
    check_all(part, {"o0": 0, "o1": 1, "o2": 2, **({"k": 1} if stored else {})})
    assert part.describe().samples == 3 + stored


def test_one_writer_committed_by_several_callers(cluster: LocalCluster, part: tq.Partition) -> None:
    async def run() -> None:
        async with tq.aio.connect(cluster.address, transport="shm", timeout=20) as client:
            same = await client.partition(part.name)
            for number in range(20):
                writer = await same.allocate(1, {"x": ("int64", [64])}, keys=[f"k{number}"])
                writer["x"].fill_(number)
                first, second = await asyncio.gather(writer.commit(), writer.commit())
                assert first.tolist() == second.tolist()
                await same.put({"x": torch.full((1, 64), -number)}, keys=[f"o{number}"])

    asyncio.run(run())
    with ThreadPoolExecutor(3) as threads:
        for number in range(20, 40):
            writer = part.allocate(1, {"x": ("int64", [64])}, keys=[f"k{number}"])
            writer["x"].fill_(number)
            ids = list(threads.map(lambda _, writer=writer: writer.commit().tolist(), range(3)))
            assert ids == [ids[0]] * 3
            part.put({"x": torch.full((1, 64), -number)}, keys=[f"o{number}"])
    check_all(part, {f"k{number}": number for number in range(40)})
    check_all(part, {f"o{number}": -number for number in range(40)})


def test_an_abort_during_a_commit_that_waits_for_room(client: tq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    part = client.create_partition("aborted-waiting", capacity_samples=1)
    others = part.put({"x": torch.zeros(1, 64, dtype=torch.int64)})
    perform, begun = driver._perform, threading.Event()

    def note(effect: Any, stubs: Any) -> Any:
        if getattr(effect, "method", "") == "Commit":
            begun.set()
        return perform(effect, stubs)

    monkeypatch.setattr(driver, "_perform", note)
    for room in (False, True):
        writer = part.allocate(1, {"x": ("int64", [64])})
        writer["x"].fill_(5)
        begun.clear()
        with ThreadPoolExecutor(1) as threads:
            commit = threads.submit(writer.commit, timeout=60 if room else 0.5)
            assert begun.wait(60)
            writer.abort()
            if room:
                part.clear(others)
                others = commit.result()
            else:
                with pytest.raises(tq.BackpressureTimeout):
                    commit.result()
        assert ("committed" if room else "aborted") in repr(writer)
    assert (part.get(others)["x"] == 5).all()
    client.delete_partition("aborted-waiting")


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_commit_whose_reply_was_lost_has_one_effect(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    perform = driver._perform

    def lose(effect: Any, stubs: Any) -> Any:
        reply = perform(effect, stubs)
        if getattr(effect, "method", "") == "Commit":
            raise tq.Unavailable("the reply was lost")
        return reply

    with tq.connect(cluster.address, transport=transport, timeout=20) as client:
        part = client.create_partition(f"lost-{transport}")
        with part.allocate(2, {"x": ("int64", [])}) as writer:
            writer["x"].fill_(1)
            for _ in range(2):
                with monkeypatch.context() as patch:
                    patch.setattr(driver, "_perform", lose)
                    with pytest.raises(tq.Unavailable):
                        writer.commit(timeout=0.3)
                part.put({"x": torch.zeros(1, dtype=torch.int64)})
            ids = writer.commit()
        assert part.describe().samples == 4
        assert part.get(ids)["x"].tolist() == [1, 1]
        client.delete_partition(part.name)


def test_everything_is_free_again(cluster: LocalCluster, client: tq.Client) -> None:
    for info in client.partitions():
        client.delete_partition(info.name)
    used = lambda: sum(node.used_bytes for node in client.describe().nodes)  # noqa: E731
    wait_until(lambda: used() == 0, what="every byte is given back")
