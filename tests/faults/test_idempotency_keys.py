"""A key that is put again: with the same bytes nothing happens, with others nothing changes and everybody is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

import tqclient as tq
from tests.unit.codec import strategies
from tests.unit.codec.values import identical, rows_of
from tqserver.local import LocalCluster

ROWS = 3
NUMBERS = itertools.count()


def _listed(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=ROWS, max_size=ROWS)


def _dense(make: Any, dtypes: list[Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    forms = st.tuples(st.sampled_from(dtypes), st.lists(st.integers(0, 3), max_size=2))
    return forms.flatmap(lambda form: st.tuples(*[make(form[0], (ROWS, *form[1]))] * 2))


def _ragged(make: Any, dtypes: list[Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    def column(form: tuple[Any, int]) -> st.SearchStrategy[list[Any]]:
        return _listed(st.integers(0, 4).flatmap(lambda length: make(form[0], (length, form[1]))))

    forms = st.tuples(st.sampled_from(dtypes), st.integers(0, 3))
    return forms.flatmap(lambda form: st.tuples(column(form), column(form)))


def _pairs(*, nested: bool = True) -> st.SearchStrategy[tuple[Any, Any]]:
    """Two columns of one form, of every kind of column."""
    kinds = [
        _dense(strategies.tensors, strategies.TORCH_DTYPES),
        _dense(strategies.arrays, strategies.NUMPY_DTYPES),
        _ragged(strategies.tensors, strategies.TORCH_DTYPES),
        _ragged(strategies.arrays, strategies.NUMPY_DTYPES),
        st.tuples(*[_listed(strategies.texts)] * 2),
        st.tuples(*[_listed(st.binary(max_size=8))] * 2),
        st.tuples(*[_listed(strategies.values).map(tq.Records)] * 2),
    ]
    if nested:
        inner = st.lists(_pairs(nested=False), min_size=1, max_size=2)
        kinds.append(inner.map(lambda pairs: tuple({f"f{n}": pair[i] for n, pair in enumerate(pairs)} for i in (0, 1))))
    return st.one_of(kinds)


def _mixed(first: Any, other: Any, kept: list[bool]) -> Any:
    """`other` with the rows that are kept from `first`."""
    if isinstance(first, dict):
        return {name: _mixed(first[name], other[name], kept) for name in first}
    if isinstance(first, tq.Records):
        return tq.Records(_mixed(list(first.values), list(other.values), kept))
    if isinstance(first, list):
        return [one if keep else another for one, another, keep in zip(first, other, kept, strict=True)]
    mixed = other.detach().clone().contiguous() if isinstance(other, torch.Tensor) else other.copy()
    for row in np.flatnonzero(kept):
        mixed[row] = first[row]
    return mixed


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@pytest.fixture(scope="module")
def client() -> Iterator[tq.Client]:
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster, tq.connect(cluster.address, timeout=20) as connected:
        yield connected


@given(_pairs(), st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_the_first_value_of_a_key_stays_and_its_own_bytes_may_come_again(
    client: tq.Client, pair: tuple[Any, Any], kept: list[bool]
) -> None:
    first, second = pair[0], _mixed(*pair, kept)
    keys = ["a", "b", "c"]
    name = f"part-{next(NUMBERS)}"
    part = client.create_partition(name)
    ids = part.put({"x": first}, keys=keys).tolist()
    before = part.describe()
    assert part.put({"x": first}, keys=keys).tolist() == ids
    offered = zip(rows_of(first), tree_map(_detached, rows_of(second)), strict=True)  # gradients are not stored
    conflicts = [row for row, pair in enumerate(offered) if not identical(*pair)]
    if conflicts:
        with pytest.raises(tq.DuplicateKey) as refused:
            part.put({"x": second}, keys=keys)
        assert list(refused.value.rows) == conflicts
        assert list(refused.value.existing_ids) == [ids[row] for row in conflicts]
    else:
        assert part.put({"x": second}, keys=keys).tolist() == ids
    assert identical(rows_of(first), part.get(keys=keys).list("x"))
    assert part.describe() == before
    client.delete_partition(name)


def test_of_many_that_put_one_key_at_once_one_wins_and_the_others_are_told(client: tq.Client) -> None:
    part = client.create_partition("raced")
    existing: list[tuple[int, ...]] = []

    def put(number: int) -> int | None:
        try:
            return int(part.put({"x": torch.tensor([number % 4])}, keys=["only"])[0])
        except tq.DuplicateKey as error:
            existing.append(tuple(error.existing_ids))
            return None

    with ThreadPoolExecutor(16) as pool:
        told = list(pool.map(put, range(16)))
    (stored,) = part.get(keys=["only"])["x"].tolist()
    assert part.describe().samples == 1
    (id_,) = {each for each in told if each is not None}
    assert existing == [(id_,)] * 12
    assert [number % 4 for number in range(16) if told[number] is not None] == [stored] * 4
    assert part.get([id_])["x"].tolist() == [stored]
