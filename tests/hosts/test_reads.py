"""One-sided reads ask nobody: of bytes that are damaged, cleared or used again they still give none that are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tqclient as tq
from tests.faults.probe import LEASE, Used
from tests.faults.test_corruption_flips import Stored, expected_message
from tests.faults.test_get_racing_clear import ROW_BYTES, SLOW_READER, Race, fill, row
from tests.harness import wait_until
from tests.harness.remote import Remote
from tests.hosts.cluster import CLIENTS, RECLAIM_SECONDS, STORAGE, TRANSPORT, HostCluster
from tests.hosts.loops import delete_all
from tqclient.limits import MIB

ARENA_BYTES = 6 * MIB
ROUNDS_CI = 500
FLIPS_CI = 200
ROUNDS_PER_CALL = 2_000
NODE = STORAGE[0]


@pytest.fixture(scope="module")
def user(cluster: HostCluster) -> Iterator[Remote]:
    """A client of the one node that is up; at the end the node is empty."""
    with cluster.only(NODE):
        connected = cluster.user(CLIENTS[0], transport=TRANSPORT).wait_made()
        yield connected
        connected.close()
        cluster.probe(NODE).wait_used(Used(0), timeout=RECLAIM_SECONDS, what="everything was cleared")


@pytest.fixture(autouse=True)
def partition(user: Remote) -> Iterator[None]:
    """Deletes what the test made."""
    yield
    user.call(delete_all)


def create(client: tq.Client) -> None:
    client.create_partition("part")


def race(client: tq.Client, rounds: int) -> dict[str, Counter[str]]:
    """Runs the race within one process: whoever reads goes one-sided to the node, whoever clears to the controller."""
    part = client.partition("part")
    races = Race(part, {"copies": part.get, "views": lambda ids: part.get(ids, copy=False)})
    races.run(rounds)
    return races.outcomes


def races(user: Remote, rounds: int) -> None:
    assert rounds * 2 * ROW_BYTES > 3 * ARENA_BYTES, "too few to use any byte again"
    user.call(create)
    total: dict[str, Counter[str]] = {}
    for start in range(0, rounds, ROUNDS_PER_CALL):
        for name, outcomes in user.call(race, min(ROUNDS_PER_CALL, rounds - start)).items():
            total.setdefault(name, Counter()).update(outcomes)
    for name, outcomes in total.items():
        assert outcomes.keys() <= {"whole", "not found"}
        assert sum(outcomes.values()) == rounds
        assert min(outcomes["whole"], outcomes["not found"]) > 0, f"{name} always won, or always lost: {outcomes}"


def test_a_get_from_another_host_that_races_a_clear_is_whole_or_not_found(user: Remote) -> None:
    races(user, ROUNDS_CI)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_ten_thousand_gets_from_another_host_that_race_clears(user: Remote, rounds: int | None) -> None:
    races(user, 100 * rounds if rounds else 10_000)


def put_two(client: tq.Client) -> list[int]:
    part = client.create_partition("part")
    return [int(part.put({"x": [row(number)]})[0]) for number in (1, 2)]


def clear(client: tq.Client, id_: int) -> None:
    client.partition("part").clear(ids=[id_])


def fill_up(client: tq.Client) -> int:
    return fill(client.partition("part"), first=100)


def test_a_reader_on_another_host_slower_than_its_lease_gets_no_other_bytes(cluster: HostCluster, user: Remote) -> None:
    """It was told where the rows lie; when it looks, others have been there for long, and no node says so."""
    cleared, kept = user.call(put_two)
    address = cluster.controller.address
    reader = cluster.script(CLIENTS[1], SLOW_READER, address, TRANSPORT, cleared, kept, name="slow-reader")
    wait_until(lambda: reader.stopped, what="the reader stops")
    sealed = cluster.probe(NODE).used().sealed
    user.call(clear, cleared)
    assert cluster.probe(NODE).used().sealed == sealed  # for as long as the reader's lease lasts
    wait_until(lambda: cluster.probe(NODE).used().sealed == sealed // 2, timeout=LEASE + 1, what="its pin ends")
    assert user.call(fill_up)
    while user.call(fill_up):  # until no hole is left that another row fits: the reader can't look without meeting one
        pass
    reader.resume()
    reader.wait_for("done")
    assert reader.stdout.splitlines() == ["raised SampleNotFound", "got [2, 2, 2, 2]", "done"]
    assert reader.wait() == 0


def flip_bits(client: tq.Client, arena: Path, flips: int, seed: int) -> dict[str | None, int]:
    """Flips bits one by one in the arena of another host; returns how many hit each field."""
    hit: dict[str | None, int] = {}
    blocks = Stored(client, np.memmap(arena, np.uint8, "r+"), np.random.default_rng(seed))
    ids = blocks.ids
    for _ in range(flips):
        with blocks.flipped() as (block, damage):
            hit[damage.field] = hit.get(damage.field, 0) + 1
            spared = [row for row in range(len(ids[block])) if row not in damage.rows]
            if damage.field is not None:
                with pytest.raises(tq.CorruptBlock) as caught:
                    blocks.part.get(ids[block], fields=[damage.field], copy=bool(block % 2))
                assert str(caught.value).startswith(expected_message(blocks, block, damage))
                assert caught.value.rows == (damage.rows[0],)
                assert caught.value.ids == (ids[block][damage.rows[0]],)
            if spared:
                batch: Any = blocks.part.get([ids[block][row] for row in spared])
                for field in blocks.values[block]:
                    blocks.assert_equal(block, field, spared, batch.list(field))
    blocks.close()
    return hit


def flipped(cluster: HostCluster, user: Remote, flips: int, seed: int) -> None:
    hit = user.call(flip_bits, cluster.arena(NODE), flips, seed)
    assert hit.keys() >= {"dense", "ragged", "mm", "prompt"}
    assert sum(hit.values()) == flips
    cluster.probe(NODE).wait_used(Used(0), timeout=RECLAIM_SECONDS, what="the blocks are gone")


def test_a_flipped_bit_on_another_host_is_found_and_spares_the_neighbours(
    cluster: HostCluster, user: Remote, seed: int
) -> None:
    flipped(cluster, user, FLIPS_CI, seed)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_ten_thousand_flipped_bits_on_another_host_are_found(cluster: HostCluster, user: Remote, seed: int) -> None:
    for turn in range(20):  # a call has a minute
        flipped(cluster, user, 500, seed + turn)
