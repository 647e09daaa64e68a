from __future__ import annotations

from typing import Any

import msgpack
import pytest

import tqclient as tq
from tqclient.errors import InvalidArgument
from tqclient.samplers import Sampler


@pytest.mark.parametrize(
    ("sampler", "name", "params"),
    [
        (tq.Fifo(), "fifo", {}),
        (tq.Lifo(), "lifo", {}),
        (tq.Random(), "random", {"seed": 0}),
        (tq.Random(-7), "random", {"seed": -7}),
        (tq.Prioritized("advantage"), "prioritized", {"tag": "advantage"}),
        (tq.GroupSampler(8), "group", {"size": 8}),
        (tq.GroupSampler(), "group", {"size": None}),
        (tq.SeqlenBalanced("tokens"), "seqlen_balanced", {"field": "tokens", "groups": False}),
        (tq.SeqlenBalanced("images.pixels", groups=4), "seqlen_balanced", {"field": "images.pixels", "groups": 4}),
        (tq.Sampler("mine", alpha=0.5, name="x"), "mine", {"alpha": 0.5, "name": "x"}),
    ],
)
def test_what_crosses_the_wire(sampler: Sampler, name: str, params: dict[str, Any]) -> None:
    wire = sampler.to_wire()
    assert (wire.name, msgpack.unpackb(wire.params)) == (name, params)
    assert sampler == tq.Sampler(name, **params)
    assert hash(sampler) == hash(tq.Sampler(name, **params))


def test_samplers_differ_by_name_and_parameters() -> None:
    assert tq.Random(1) != tq.Random(2)
    assert tq.Fifo() != tq.Lifo()
    assert tq.Fifo() != "fifo"
    assert repr(tq.GroupSampler(8)) == "Sampler('group', size=8)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tq.GroupSampler(0), "GroupSampler: size=0"),
        (lambda: tq.GroupSampler(True), "GroupSampler: size=True"),
        (lambda: tq.GroupSampler("8"), "GroupSampler: size='8'"),  # type: ignore[arg-type]
        (lambda: tq.SeqlenBalanced("tokens", groups=0), "SeqlenBalanced: groups=0"),
        (lambda: tq.SeqlenBalanced(""), "SeqlenBalanced: field"),
        (lambda: tq.Prioritized(3), "Prioritized: tag=3"),  # type: ignore[arg-type]
        (lambda: tq.Random(1.5), "Random: seed=1.5"),  # type: ignore[arg-type]
        (lambda: tq.Random(1 << 63), "Random: seed"),
        (lambda: tq.Sampler(""), "sampler"),
        (lambda: tq.Sampler("mine", key=object()), "sampler 'mine': parameters that cannot be sent"),
        (lambda: tq.Sampler("mine", key=1 << 70), "sampler 'mine': parameters that cannot be sent"),
    ],
)
def test_what_no_sampler_takes(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()
