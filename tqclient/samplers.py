"""How a claim picks among the samples that are ready. The controller does the picking; here a user names the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgpack

from tqclient.wire.v1 import controller_pb2


@runtime_checkable
class Sampler(Protocol):
    """A way to pick samples, as it crosses the wire."""

    @property
    def name(self) -> str:
        """Which of the controller's samplers is meant."""
        ...

    def params(self) -> dict[str, Any]:
        """Its parameters: whatever msgpack can say."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """Picks the samples that were put first. Samples that were released come before later ones."""

    @property
    def name(self) -> str:
        """Which of the controller's samplers is meant."""
        return "fifo"

    def params(self) -> dict[str, Any]:
        """None."""
        return {}


def to_wire(sampler: Sampler) -> controller_pb2.Sampler:
    """Returns the sampler as a claim carries it."""
    return controller_pb2.Sampler(name=sampler.name, params=msgpack.packb(sampler.params()))
