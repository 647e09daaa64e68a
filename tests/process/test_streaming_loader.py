"""The loader against real daemons: who gets what, and when it is acked."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import tqclient as tq
from tests.harness.supervisor import wait_until
from tqclient.torch import LoadedBatch, StreamingDataset, StreamingLoader
from tqserver.local import LocalCluster

LEASE = 2.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB", session_lease=LEASE) as running:
        yield running


@pytest.fixture(scope="module")
def client(shared_cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(shared_cluster.address, timeout=10) as connected:
        part = connected.create_partition("first")
        part.get(part.put({"x": [1]})).close()  # maps the arena, for as long as the client lives
        yield connected


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    """The process that spawned ones share, which lives as long as this one."""
    resource_tracker.ensure_running()


@pytest.fixture
def part(client: tq.Client) -> Iterator[tq.Partition]:
    partition = client.create_partition(f"loader-{next(_numbers)}")
    yield partition
    client.delete_partition(partition.name)


def fill(part: tq.Partition, rows: int, *, seal: bool = True) -> None:
    lengths = [row % 5 + 1 for row in range(rows)]
    part.put(
        {
            "number": torch.arange(rows),
            "tokens": [torch.full((length,), row) for row, length in enumerate(lengths)],
            "text": [f"row {row}" for row in range(rows)],
        }
    )
    if seal:
        part.seal()


def counts(part: tq.Partition) -> dict[str, int]:
    return part.describe().counts.get("trainer", {})


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, what="that the loader has done what it is to do")


def numbers(batches: Iterator[Any] | StreamingLoader | DataLoader[Any]) -> list[list[int]]:
    return [batch["number"].tolist() for batch in batches]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_batch_is_acked_after_its_step_and_prefetching_holds_no_more_than_asked(
    part: tq.Partition, prefetch: int
) -> None:
    fill(part, 22)
    seen = []
    with StreamingLoader(part.consumer("trainer"), 4, prefetch=prefetch) as loader:
        for turn, batch in enumerate(loader):
            seen.append(batch["number"].tolist())
            ahead = min(4 * prefetch, 22 - 4 * turn - batch.rows)
            until(lambda: counts(part)["leased"] == batch.rows + ahead)  # noqa: B023 - used at once
            assert counts(part)["consumed"] == 4 * turn == 4 * loader.step
    assert seen == [list(range(start, min(start + 4, 22))) for start in range(0, 22, 4)]
    assert counts(part)["consumed"] == 22
    assert (loader.epoch, loader.step) == (1, 0)


def test_values_come_back_as_they_went_in(part: tq.Partition) -> None:
    fill(part, 3)
    (batch,) = StreamingLoader(part.consumer("trainer"), 64)
    assert isinstance(batch, LoadedBatch)
    assert [row.tolist() for row in batch["tokens"].unbind()] == [[0], [1, 1], [2, 2, 2]]
    assert batch.padded("tokens", -1).tolist() == [[0, -1, -1], [1, 1, -1], [2, 2, 2]]
    assert batch["text"] == ["row 0", "row 1", "row 2"]
    assert batch.ids.tolist() == sorted(batch.ids.tolist())
    assert batch.attempts.tolist() == [1, 1, 1]


def second_half(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([lengths // 2, lengths], axis=1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_ranges_of_rows_are_read(no_leaks: None, part: tq.Partition, num_workers: int) -> None:
    fill(part, 7)
    ranges = {"tokens": second_half}
    with StreamingLoader(part.consumer("trainer"), 4, num_workers=num_workers, prefetch=1, ranges=ranges) as loader:
        seen = [(batch["number"].tolist(), [row.tolist() for row in batch.list("tokens")]) for batch in loader]
    lengths = {number: number % 5 + 1 for number in range(7)}
    expected = {number: [number] * (length - length // 2) for number, length in lengths.items()}
    assert [(numbers, [expected[number] for number in numbers]) for numbers, _ in seen] == seen
    assert [number for numbers, _ in seen for number in numbers] == list(range(7))
    assert counts(part)["consumed"] == 7


def test_leaving_early_gives_back_what_is_held(part: tq.Partition) -> None:
    fill(part, 12, seal=False)
    consumer = part.consumer("trainer")
    loader = StreamingLoader(consumer, 3, prefetch=2)
    for _ in loader:
        until(lambda: counts(part)["leased"] == 9)
        break
    until(lambda: counts(part)["ready"] == 12)

    def fail_in_the_second_step() -> None:
        for batch in StreamingLoader(consumer, 3, prefetch=2):
            if batch["number"][0] == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_second_step()
    until(lambda: counts(part)["ready"] == 9)
    assert counts(part)["consumed"] == 3
    part.seal()
    assert numbers(StreamingLoader(consumer, 5)) == [[3, 4, 5, 6, 7], [8, 9, 10, 11]]


def test_closing_releases_and_cuts_a_wait_short(
    no_leaks: None, part: tq.Partition, shared_cluster: LocalCluster
) -> None:
    fill(part, 5, seal=False)
    with tq.connect(shared_cluster.address, timeout=10) as client:
        loader = StreamingLoader(client.partition(part.name).consumer("trainer"), 4, prefetch=2)
        stream = iter(loader)
        assert next(stream)["number"].tolist() == [0, 1, 2, 3]
        start = time.monotonic()
        loader.close()  # a claim for four more waits meanwhile
        assert time.monotonic() - start < 5
        until(lambda: counts(part)["ready"] == 5)
        with pytest.raises(StopIteration):
            next(stream)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_closing_while_another_thread_waits_ends_no_epoch(no_leaks: None, part: tq.Partition, num_workers: int) -> None:
    fill(part, 6, seal=False)
    loader = StreamingLoader(part.consumer("trainer"), 4, prefetch=1, num_workers=num_workers)
    seen: list[list[int]] = []
    trainer = threading.Thread(target=lambda: seen.extend(numbers(loader)))
    trainer.start()
    until(lambda: counts(part).get("consumed") == 4)  # it waits for two more
    loader.close()
    trainer.join(60)
    assert not trainer.is_alive()
    assert seen == [[0, 1, 2, 3]]
    assert (loader.epoch, loader.step) == (0, 1)
    part.seal()
    assert numbers(loader) == [[4, 5]]
    assert (loader.epoch, loader.step) == (1, 0)


def test_a_batch_that_is_on_its_way_when_the_loader_is_closed_is_given_back(
    part: tq.Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(part, 4)
    loader = StreamingLoader(part.consumer("trainer"), 4)
    stream: Any = iter(loader)
    monkeypatch.setattr(stream._feed, "took", lambda held: loader.close())
    with pytest.raises(StopIteration):
        next(stream)
    assert counts(part)["ready"] == 4
    assert (loader.epoch, loader.step) == (0, 0)


def test_a_wait_ends_with_samples_that_come_later(part: tq.Partition) -> None:
    fill(part, 2, seal=False)

    def put() -> None:
        until(lambda: counts(part).get("consumed") == 2)
        fill(part, 3)

    producer = threading.Thread(target=put)
    producer.start()
    assert [len(each) for each in numbers(StreamingLoader(part.consumer("trainer"), 2))] == [2, 2, 1]
    producer.join()


def test_settling_by_hand(part: tq.Partition) -> None:
    fill(part, 6)
    seen = []
    loader = StreamingLoader(part.consumer("trainer"), 2, prefetch=0)
    for batch in loader:
        seen.append(batch["number"].tolist())
        if len(seen) == 1:
            loader.ack()
            assert (loader.step, counts(part)["consumed"]) == (1, 2)
            loader.ack()
            batch.ack()
            with pytest.raises(tq.InvalidArgument, match="was acked already"):
                batch.release()
        elif len(seen) == 2:
            batch.release()
            with pytest.raises(tq.InvalidArgument, match="was released already"):
                loader.ack()
    assert seen == [[0, 1], [2, 3], [2, 3], [4, 5]]
    assert counts(part)["consumed"] == 6
    with pytest.raises(tq.InvalidArgument, match="was acked already"):
        batch.release()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_settled_by_its_block(part: tq.Partition, num_workers: int) -> None:
    fill(part, 8)
    seen = []
    loader = StreamingLoader(part.consumer("trainer"), 2, prefetch=1, num_workers=num_workers)
    for batch in loader:
        seen.append(batch["number"].tolist())
        try:
            with batch as entered:
                assert entered is batch
                if len(seen) == 1:
                    raise ZeroDivisionError
                if len(seen) == 2:
                    batch.release()
        except ZeroDivisionError:
            with pytest.raises(tq.InvalidArgument, match="was released already"):
                batch.ack()
        assert loader.step == max(0, len(seen) - 2)  # acked at the block's end, and not when the next one is asked for
    assert sorted(itertools.chain(*seen)) == sorted([*range(8), *seen[0], *seen[1]])
    assert counts(part)["consumed"] == 8
    with batch:  # again: no effect
        pass
    for settled in (batch.renew, batch.release):
        with pytest.raises(tq.InvalidArgument, match="was acked already"):
            settled()


def test_a_block_after_its_loop_says_that_nothing_was_acked(part: tq.Partition) -> None:
    fill(part, 2)
    with pytest.raises(tq.InvalidArgument, match="has ended, which released it"):  # noqa: PT012
        with next(iter(StreamingLoader(part.consumer("trainer"), 2))) as batch:  # nobody keeps the iteration
            pass
        batch.ack()
    until(lambda: counts(part)["ready"] == 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_renewed_by_hand(part: tq.Partition, num_workers: int) -> None:
    fill(part, 4)
    stream = iter(StreamingLoader(part.consumer("trainer"), 2, prefetch=1, num_workers=num_workers))
    batch = next(stream)
    batch.renew()
    part.consumer("trainer").reset()  # its claims end
    with pytest.raises(tq.LeaseExpired):
        batch.renew()


def test_an_iteration_is_of_one_thread(no_leaks: None, part: tq.Partition) -> None:
    """Whoever asks for the next batch acks the last: another thread's, of which the step still runs."""
    fill(part, 2, seal=False)
    loader = StreamingLoader(part.consumer("trainer"), 2)
    stream = iter(loader)
    assert next(stream)["number"].tolist() == [0, 1]
    waiting = threading.Thread(target=lambda: list(stream))
    waiting.start()
    until(lambda: counts(part)["consumed"] == 2)
    with pytest.raises(tq.InvalidArgument, match="another thread is asking this iterator"):
        next(stream)
    part.seal()
    waiting.join(60)
    assert not waiting.is_alive()
    assert list(stream) == []


def test_leases_of_prefetched_batches_are_renewed(client: tq.Client) -> None:
    part = client.create_partition(f"loader-{next(_numbers)}", lease=1.0, max_attempts=1)
    fill(part, 6)
    stream = iter(StreamingLoader(part.consumer("trainer"), 2, prefetch=2))
    first = next(stream)["number"].tolist()
    over = time.monotonic() + 2.5  # more than two leases
    until(lambda: time.monotonic() > over)
    assert [first, *numbers(stream)] == [[0, 1], [2, 3], [4, 5]]
    assert counts(part)["consumed"] == 6
    client.delete_partition(part.name)


def test_what_was_prefetched_under_a_session_that_ended_is_not_handed_out(shared_cluster: LocalCluster) -> None:
    with tq.connect(shared_cluster.address, timeout=10) as client:
        part = client.create_partition(f"loader-{next(_numbers)}")
        fill(part, 8)
        loader = StreamingLoader(part.consumer("trainer"), 2, prefetch=2)
        stream = iter(loader)
        assert next(stream)["number"].tolist() == [0, 1]
        until(lambda: counts(part)["leased"] == 6)
        state = client._state
        assert state.session is not None
        state.session_ended(state.session)  # as when this process stood still for longer than a lease
        with pytest.raises(tq.LeaseExpired):
            next(stream)
        assert sorted(itertools.chain.from_iterable(numbers(stream))) == list(range(8))
        assert counts(part)["consumed"] == 8
        client.delete_partition(part.name)


def test_a_checkpoint_counts_what_was_acked(part: tq.Partition) -> None:
    fill(part, 8)
    consumer = part.consumer("trainer")
    loader = StreamingLoader(consumer, 2)
    for turn, _ in enumerate(loader):
        if turn == 1:
            assert loader.state_dict()["step"] == 1
            loader.ack()
            # A claim still under way at the end might be granted what is given back, and give that back again later.
            until(lambda: counts(part)["leased"] == 4)
            state = loader.state_dict()
            break
    assert state == {"version": 1, "partition": part.name, "consumer": "trainer", "epoch": 0, "step": 2}
    until(lambda: counts(part)["ready"] == 4)  # what was fetched ahead is given back
    resumed = StreamingLoader(consumer, 2)
    resumed.load_state_dict(state)
    steps = [(resumed.step, batch["number"].tolist()) for batch in resumed]
    assert steps == [(2, [4, 5]), (3, [6, 7])]
    assert resumed.state_dict() == {**state, "epoch": 1, "step": 0}
    consumer.reset()
    assert len(numbers(resumed)) == 4
    assert resumed.epoch == 2


def test_states_that_do_not_fit(part: tq.Partition) -> None:
    loader = StreamingLoader(part.consumer("trainer"))
    state = loader.state_dict()
    with pytest.raises(tq.InvalidArgument, match="of consumer 'critic', and this one is 'trainer'"):
        loader.load_state_dict({**state, "consumer": "critic"})
    for off in ({}, {**state, "version": 2}, {**state, "step": -1}, {**state, "epoch": None}):
        with pytest.raises(tq.InvalidArgument):
            loader.load_state_dict(off)
    loader.load_state_dict({**state, "partition": "an earlier one", "epoch": 3, "step": 5})
    assert (loader.epoch, loader.step) == (3, 0)


def test_an_error_of_the_transform_ends_the_loop_and_gives_the_batch_back(part: tq.Partition) -> None:
    fill(part, 6)

    def transform(batch: LoadedBatch) -> int:
        with pytest.raises(tq.InvalidArgument, match="only a batch that a StreamingLoader yielded"):
            batch.ack()
        return 6 // (2 - int(batch["number"][0]))

    loader = StreamingLoader(part.consumer("trainer"), 2, transform=transform)
    stream = iter(loader)
    assert next(stream) == 3
    with pytest.raises(ZeroDivisionError):
        next(stream)
    until(lambda: counts(part)["ready"] == 4)


def test_all_ranks_of_a_replica_see_the_same_batches(part: tq.Partition, shared_cluster: LocalCluster) -> None:
    fill(part, 10)
    seen: dict[int, list[tuple[int | None, list[int]]]] = {0: [], 1: []}

    def rank(number: int) -> None:
        with tq.connect(shared_cluster.address, timeout=10) as mine:
            topology = tq.Topology(dp=1, tp=2, rank=number)
            consumer = mine.partition(part.name).consumer("trainer", topology=topology)
            for batch in StreamingLoader(consumer, 3, prefetch=2):
                seen[number].append((batch.step, batch["number"].tolist()))

    threads = [threading.Thread(target=rank, args=(number,)) for number in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1] == [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 7, 8]), (3, [9])]
    assert counts(part)["consumed"] == 10


def test_what_one_rank_releases_comes_again_to_all_of_its_replica(
    part: tq.Partition, shared_cluster: LocalCluster
) -> None:
    fill(part, 10)
    done: dict[int, list[int]] = {0: [], 1: []}
    both_have_one = threading.Barrier(2)
    released = threading.Event()

    def rank(number: int) -> None:
        with tq.connect(shared_cluster.address, timeout=10) as mine:
            topology = tq.Topology(dp=1, tp=2, rank=number)
            consumer = mine.partition(part.name).consumer("trainer", topology=topology)
            stream = iter(StreamingLoader(consumer, 3, prefetch=2))
            first = next(stream)
            both_have_one.wait(10)
            if number == 1:
                first.release()
                released.set()
            else:
                assert released.wait(10)
                with pytest.raises(tq.LeaseExpired):
                    next(stream)
            done[number] = [*itertools.chain.from_iterable(numbers(stream))]

    threads = [threading.Thread(target=rank, args=(number,)) for number in done]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done[0] == done[1] == list(range(10))
    assert counts(part)["consumed"] == 10


def test_beneath_a_data_loader(part: tq.Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(part, 5)
    dataset = StreamingDataset(part.consumer("trainer"), 2)
    assert numbers(DataLoader(dataset, batch_size=None)) == [[0, 1], [2, 3], [4]]
    assert counts(part)["consumed"] == 5
    monkeypatch.setattr("tqclient.torch.dataset.get_worker_info", object)
    with pytest.raises(tq.InvalidArgument, match="use tq\\.torch\\.StreamingLoader"):
        next(iter(dataset))


def in_worker(batch: LoadedBatch) -> dict[str, Any]:
    return {"pid": os.getpid(), "batch": batch, "tokens": batch["tokens"]}


def test_workers_deliver_each_sample_once(no_leaks: None, part: tq.Partition) -> None:
    fill(part, 30)
    loader = StreamingLoader(part.consumer("trainer"), 4, num_workers=2, prefetch=2, transform=in_worker)
    seen: dict[int, list[int]] = {}
    with loader:
        for turn, value in enumerate(loader):
            batch = value["batch"]
            assert value["pid"] != os.getpid()
            assert counts(part)["consumed"] == sum(map(len, seen.values()))
            for row, number in enumerate(batch["number"].tolist()):
                seen.setdefault(turn, []).append(number)
                expected = [number] * (number % 5 + 1)
                assert value["tokens"].unbind()[row].tolist() == batch.list("tokens")[row].tolist() == expected
                assert batch["text"][row] == f"row {number}"
    assert sorted(itertools.chain.from_iterable(seen.values())) == list(range(30))
    assert counts(part)["consumed"] == 30


def test_a_worker_that_is_killed_is_an_error_and_its_samples_come_again(no_leaks: None, part: tq.Partition) -> None:
    fill(part, 20)
    consumer = part.consumer("trainer")
    stream = iter(StreamingLoader(consumer, 4, num_workers=1, prefetch=1, transform=in_worker))
    os.kill(next(stream)["pid"], signal.SIGKILL)
    with pytest.raises((tq.LeaseExpired, tq.InternalError), match="ended"):  # the ack finds out, or the next batch
        list(stream)
    del stream
    again = numbers(StreamingLoader(consumer, 4))
    assert sorted(itertools.chain.from_iterable(again)) == list(range(20))
    assert counts(part)["consumed"] == 20


def test_what_cannot_be(part: tq.Partition, shared_cluster: LocalCluster) -> None:
    consumer = part.consumer("trainer")
    counted = part.consumer("trainer", token_field="tokens")
    rank = part.consumer("ranks", topology=tq.Topology(dp=2, rank=0))
    for arguments, message in (
        ((rank, {"num_workers": 1}), "a rank is one process"),
        ((consumer, {"num_workers": 1, "prefetch": 0}), "give prefetch=1"),
        ((consumer, {"prefetch": -1}), "prefetch=-1"),
        ((consumer, {"num_workers": True}), "num_workers=True"),
        ((part, {}), "expected what Partition.consumer"),
        ((consumer, {"ranges": {"tokens": (3, 1)}}), r"ranges\['tokens'\]"),
        ((consumer, {"transform": 5}), "transform=5: expected a function"),
        ((consumer, {"batch_size": None}), "give batch_size, max_tokens, or both"),
        ((consumer, {"max_tokens": 8}), "give the consumer token_field="),
        *(((consumer, {"batch_size": size}), f"batch_size={size}: expected") for size in (0, -1, True, 2.5, 10**9)),
        *(((counted, {"max_tokens": most}), f"max_tokens={most}: expected") for most in (0, 1.5, 1 << 63)),
    ):
        with pytest.raises(tq.InvalidArgument, match=message):
            StreamingLoader(arguments[0], **arguments[1])  # type: ignore[arg-type]
    for arguments in ({"transform": lambda batch: batch}, {"ranges": {"tokens": lambda lengths: lengths}}):
        with pytest.raises(tq.InvalidArgument, match="functions of a module"):
            iter(StreamingLoader(consumer, num_workers=2, **arguments))
    assert counts(part) == {}  # nothing was claimed
