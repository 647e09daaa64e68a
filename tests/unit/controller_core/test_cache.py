"""What is kept of all samples: whatever is in use, and that nothing is made anew while it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.model.driver import Driver, claim_request, client_id
from tqserver.controller.core import consumer, limits, tags
from tqserver.controller.core.cache import Cache
from tqserver.controller.core.partition import Partition

MANY = 100
Array = NDArray[np.uint8]


def _cache(**options: int) -> Cache[int, Array]:
    return Cache(**{"idle": 4, "most": 1_000, "most_bytes": 1 << 30, **options})


def _look(values: Cache[int, Array], key: int, size: int = 1) -> bool:
    """Looks at a value; says whether it had to be made."""
    if values.get(key) is not None:
        return False
    values.add(key, np.zeros(size, np.uint8))
    return True


def _pass(values: Cache[int, Array]) -> None:
    for _ in range(limits.IDLE_CHANGES):
        values.changed()


def test_what_nobody_looks_at_is_dropped_but_for_the_latest() -> None:
    values = _cache()
    assert all(_look(values, key) for key in range(MANY))
    _pass(values)
    assert len(values) == MANY  # all were looked at since the start
    assert not any(_look(values, key) for key in (7, 1))
    _pass(values)
    assert [key for key, _ in values.items()] == [98, 99, 7, 1]
    _pass(values)
    assert [key for key, _ in values.items()] == [98, 99, 7, 1]  # so few cost little


def test_what_is_in_use_stays_however_many_changes_there_are() -> None:
    values = _cache()
    made = Counter[int]()
    for _ in range(3):
        made.update(key for key in range(MANY) if _look(values, key))
        _pass(values)
    assert made == Counter(range(MANY))


@pytest.mark.parametrize("options", [{"most": MANY}, {"most_bytes": 8 * MANY}])
def test_a_few_too_many_have_few_made_anew(options: dict[str, int]) -> None:
    values = _cache(**options)
    rounds, more = 10, 3
    made = [sum(_look(values, key, 8) for key in range(MANY + more)) for _ in range(rounds)]
    assert made[0] == MANY + more
    assert max(made[1:]) <= 4 * more
    assert len(values) == MANY


def test_one_that_is_too_large_is_kept_all_the_same() -> None:
    values = _cache(most_bytes=10)
    for key in range(3):
        assert _look(values, key, 100)
        assert not _look(values, key)
    assert len(values) == 1


# In the core.


def _counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Returns a list that has an entry for each call."""
    calls, called = list[str](), getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return called(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


def _looks(driver: Driver, session: int, p: int, options: list[dict[str, Any]]) -> Callable[[], None]:
    """Returns what looks at claims that wait, all of them."""
    requests = [claim_request(p, 50, **each) for each in options]
    for request in requests:
        request.mutation.client_id, request.mutation.session = client_id(1), session

    def look() -> None:
        for request in requests:
            driver.core.ready_count(request)
            driver.core.readiness(request)

    return look


def _put_shards(driver: Driver, session: int, p: int) -> None:
    """Puts two samples of each."""
    driver.put(session, p, 2 * MANY, tags=[{"shard": row % MANY} for row in range(2 * MANY)])


@pytest.mark.parametrize("named", [True, False])
def test_claims_that_wait_with_many_choices_look_at_all_samples_once(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    p = driver.partition(session, consumers=["x"] if named else (), keep=True)
    _put_shards(driver, session, p)
    look = _looks(driver, session, p, [{"where": {"shard": shard}} for shard in range(MANY)])
    made = _counted(monkeypatch, consumer, "View")
    for _ in range(5):
        look()
        driver.put(session, p, 1, tags=[{"shard": 0}])
    assert len(made) == MANY
    driver.core.check_invariants()


def test_many_consumers_that_wait_for_their_first_claim_look_at_all_samples_once(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = driver.partition(session, consumers=(), keep=True)
    driver.put(session, p, 10)
    look = _looks(driver, session, p, [{"consumer": f"c{number}"} for number in range(MANY)])
    made, begun = _counted(monkeypatch, consumer, "View"), _counted(monkeypatch, Partition, "fresh")
    for _ in range(5):
        look()
        driver.put(session, p, 1)
    assert (len(made), len(begun)) == (1, 1)
    driver.core.check_invariants()


def test_a_first_claim_leaves_to_the_others_what_they_look_at(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = driver.partition(session, consumers=(), keep=True)
    _put_shards(driver, session, p)
    options = [{"consumer": f"c{shard}", "where": {"shard": shard}} for shard in range(MANY)]
    _looks(driver, session, p, options)()
    made = _counted(monkeypatch, consumer, "View")
    for shard in range(0, MANY, 2):
        assert driver.claim(session, p, 2, **options[shard]).claim_id
    _looks(driver, session, p, options)()
    assert not made
    assert [driver.counts(p, f"c{shard}")[2] for shard in range(0, MANY, 2)] == [2] * (MANY // 2)
    driver.core.check_invariants()


@pytest.mark.parametrize(("owner", "name"), [(consumer, "PriorityIndex"), (tags, "unpacked")])
def test_claims_by_the_numbers_of_many_tags_in_turn_look_at_all_samples_once(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    p = driver.partition(session, keep=True, max_attempts=100)
    driver.put(session, p, 10, tags=[{f"score {tag}": row * tag for tag in range(15)} for row in range(10)])
    made = _counted(monkeypatch, owner, name)
    for _ in range(3):
        for tag in range(15):
            claim = driver.claim(session, p, 2, sampler="prioritized", params={"tag": f"score {tag}"})
            driver.settle(session, claim.claim_id, ack=False)
    assert len(made) == 15
    driver.core.check_invariants()


def test_claims_for_groups_of_many_sizes_look_at_all_samples_once(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = driver.partition(session, keep=True)
    driver.put(session, p, 4, groups=[0] * 4)
    sizes = [{"sampler": "group", "params": {"size": size}} for size in (1, 2, 5, 10, 25, 50)]
    look = _looks(driver, session, p, sizes)
    made = _counted(monkeypatch, consumer, "GroupIndex")
    for _ in range(5):
        look()
    assert len(made) == len(sizes)
    driver.core.check_invariants()
