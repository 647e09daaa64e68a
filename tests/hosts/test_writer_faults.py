"""Writers on other hosts that die, or are held for long, while their bytes are on the way to the arena."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import tqclient as tq
from tests.faults import test_producer_stopped
from tests.faults.probe import LEASE, Used
from tests.harness import Child, wait_until
from tests.harness.remote import Remote
from tests.hosts.cluster import CLIENTS, RECLAIM_SECONDS, STORAGE, TRANSPORT, HostCluster, wait_seconds
from tqclient.limits import KIB, MIB

ARENA_BYTES = 24 * MIB
NODE = STORAGE[0]
RATE = "40mbit"
"""At which bytes reach the node while writers are caught: 5 MB/s."""
STAGING_BYTES = 2 * MIB
"""Of the writers: a block goes through it in pieces, some of which are not under way when the writer is caught."""
SWEEP = 4 * KIB
"""Every so many bytes the arena is looked at."""
STOP_LEASES = 10
FOREIGN_ROWS = 1_000

# One put of a row of one number, at a signal. `once` is a put without its second tries.
WRITER = """
import signal, sys
import numpy as np
import tqclient as tq
from tests.harness.stdout import keep_to_python
from tqclient.operations import put, sessions

keep_to_python()
address, transport, how, number, size = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])

def try_once(state, deadline, attempt):
    session = yield from sessions.live_session(state, deadline)
    return (yield from attempt(session))

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
if how == "once":
    put.in_session = try_once
with tq.connect(address, transport=transport, timeout=60) as client:
    part = client.partition("part")
    print("ready")
    signal.sigwait({signal.SIGUSR1})
    try:
        ids = part.put({"x": [np.full(size // 8, number)]}, keys=[f"new-{number}"])
        print("answer:", ids.tolist())
    except tq.TQError as error:
        print(f"answer: {type(error).__name__}: {error}")
"""


class Stage:
    """One node with one sample, and what it holds without the writers."""

    def __init__(self, cluster: HostCluster, user: Remote) -> None:
        self.cluster = cluster
        self.user = user

    def write(self, how: str, number: int, size_bytes: int) -> Child:
        """Starts a writer on the other client host."""
        return self.cluster.script(
            CLIENTS[0],
            WRITER,
            self.cluster.controller.address,
            TRANSPORT,
            how,
            number,
            size_bytes,
            name=f"writer-{number}",
            env={"TQ_MOONCAKE_STAGING": str(STAGING_BYTES)},
        )

    def landed_bytes(self, number: int) -> int:
        """About how many bytes of a writer are in the arena."""
        arena = np.memmap(self.cluster.arena(NODE), np.int64, "r")
        return int(np.count_nonzero(arena[:: SWEEP // 8] == number)) * SWEEP

    def catch(self, writers: dict[int, Child], stops: dict[int, int], seize: Callable[[Child], None]) -> dict[int, int]:
        """Lets all writers begin, and seizes each when so much of it has arrived; returns how much that was."""
        for writer in writers.values():
            writer.wait_for("ready")
        landed: dict[int, int] = {}

        def seize_some() -> bool:
            for number in writers.keys() - landed.keys():
                arrived = self.landed_bytes(number)
                if arrived >= stops[number]:
                    seize(writers[number])
                    landed[number] = arrived
            return len(landed) == len(writers)

        for writer in writers.values():
            writer.signal(signal.SIGUSR1)
        wait_until(seize_some, what="every writer is seized")
        for writer in writers.values():
            assert "answer" not in writer.stdout, writer.report()
        return landed


@pytest.fixture(scope="module")
def user(cluster: HostCluster) -> Iterator[Remote]:
    """A client that nothing is done to, of the one node that is up."""
    with cluster.only(NODE):
        yield cluster.user(CLIENTS[1], transport=TRANSPORT).wait_made()


@pytest.fixture
def stage(cluster: HostCluster, user: Remote) -> Iterator[Stage]:
    user.call(prepare)
    yield Stage(cluster, user)
    user.call(tq.Client.delete_partition, "part")
    cluster.probe(NODE).wait_used(Used(0), timeout=RECLAIM_SECONDS, what="everything was deleted")


FIRST = np.arange(1 << 17)


def prepare(client: tq.Client) -> None:
    client.create_partition("part").put({"x": [FIRST]}, keys=["first"])


def assert_nothing_came_of_it(client: tq.Client, numbers: list[int]) -> None:
    part = client.partition("part")
    assert part.describe().samples == 1
    for number in numbers:
        with pytest.raises(tq.SampleNotFound):
            part.get(keys=[f"new-{number}"])
    assert np.array_equal(part.get(keys=["first"]).list("x")[0], FIRST)


@pytest.mark.timeout(90)
def test_writers_killed_on_another_host_leave_nothing(cluster: HostCluster, stage: Stage) -> None:
    size_bytes = 4 * MIB
    baseline = cluster.probe(NODE).used_once_sealed()
    assert baseline == Used(baseline.sealed)
    stops = {901: SWEEP, 902: size_bytes // 4, 903: size_bytes // 2}  # number: bytes that are in place
    writers = {number: stage.write("put", number, size_bytes) for number in stops}
    with cluster.network.throttled(cluster.network[NODE], RATE):
        landed = stage.catch(writers, stops, Child.kill)
    assert min(landed.values()) < size_bytes
    held = cluster.probe(NODE).used()
    assert held.sealed == baseline.sealed
    assert held.reserved + held.quarantined > size_bytes  # the first may have come back by now
    cluster.probe(NODE).wait_used(baseline, timeout=RECLAIM_SECONDS, what="killed, bytes come back")
    stage.user.call(assert_nothing_came_of_it, list(stops))


def fill(client: tq.Client) -> dict[int, NDArray[np.int64]]:
    return test_producer_stopped.fill(client.partition("part"), FOREIGN_ROWS)


def assert_unchanged(client: tq.Client, stored: dict[int, NDArray[np.int64]]) -> None:
    part = client.partition("part")
    test_producer_stopped.assert_unchanged(part, stored)
    assert part.describe().samples == 1 + len(stored)


@pytest.mark.timeout(120)
def test_a_stopped_writer_on_another_host_changes_no_foreign_byte_and_its_late_seal_is_refused(
    cluster: HostCluster, stage: Stage
) -> None:
    size_bytes = 6 * MIB
    baseline = cluster.probe(NODE).used_once_sealed()
    writers = {number: stage.write(how, number, size_bytes) for number, how in ((801, "put"), (802, "once"))}
    with cluster.network.throttled(cluster.network[NODE], RATE):
        stage.catch(writers, dict.fromkeys(writers, 256 * KIB), Child.stop)
    stopped = time.monotonic()
    assert cluster.probe(NODE).used().reserved > 2 * size_bytes
    cluster.probe(NODE).wait_used(baseline, timeout=RECLAIM_SECONDS, what="the bytes of the stopped can go to others")
    missing = [size_bytes - stage.landed_bytes(number) for number in writers]
    assert min(missing) > MIB, f"nothing is left that could come late: {missing}"

    stored = stage.user.call(fill)
    free_bytes = cluster.describe(NODE).capacity_bytes - sum(cluster.probe(NODE).used())
    assert free_bytes < size_bytes, "a late write could miss every foreign row"
    wait_seconds(STOP_LEASES * LEASE, since=stopped)
    for writer in writers.values():
        writer.resume()
    answers = [writer.wait_for("answer: ").split()[1] for writer in writers.values()]
    # What `put` tries again finds the node full of others; without that it was told that its session is over.
    assert answers == ["StorageFull:", "LeaseExpired:"]
    for writer in writers.values():
        assert writer.wait(timeout=10) == 0, writer.report()
    stage.user.call(assert_unchanged, stored)
