"""Which of the ready samples a claim gets. A new sampler is a class here and a line in `SAMPLERS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgpack
import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument
from tqclient.wire.v1 import controller_pb2
from tqserver.controller.core.view import View


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What a claim asks of a sampler.

    Attributes:
        batch_size: rows wanted.
        final: no further sample will become ready: what is left may be handed out, however little.
        params: of the sampler.
    """

    batch_size: int
    final: bool
    params: dict[str, Any]


class Sampler(Protocol):
    """Chooses rows. Stateless: what it answers depends on its arguments alone."""

    def check(self, params: dict[str, Any]) -> None:
        """Raises InvalidArgument for parameters that this sampler does not know."""

    def has(self, view: View, request: SampleRequest) -> bool:
        """Says, at little cost, whether `sample` would choose rows."""

    def sample(self, view: View, request: SampleRequest) -> NDArray[np.int64] | None:
        """Returns ready slots in delivery order (int64, at least one), or None when the claim must wait."""


class Fifo:
    """The oldest samples first; one that is delivered again comes before newer ones."""

    def check(self, params: dict[str, Any]) -> None:
        """Takes no parameters."""
        if params:
            raise InvalidArgument(f"the fifo sampler takes no parameters, not {sorted(map(str, params))}")

    def has(self, view: View, request: SampleRequest) -> bool:
        """Whether a whole batch is ready, or the last, short one."""
        return view.count >= request.batch_size or (request.final and view.count > 0)

    def sample(self, view: View, request: SampleRequest) -> NDArray[np.int64] | None:
        """The lowest ready slots."""
        return view.first(request.batch_size) if self.has(view, request) else None


SAMPLERS: Final[dict[str, Sampler]] = {"fifo": Fifo()}


def sampler_of(request: controller_pb2.ClaimRequest) -> tuple[Sampler, dict[str, Any]]:
    """Returns the sampler that a claim names, `fifo` when it names none, and its parameters.

    Raises:
        InvalidArgument: no sampler has that name, or its parameters are off.
    """
    name = request.sampler.name or "fifo"
    sampler = SAMPLERS.get(name)
    if sampler is None:
        raise InvalidArgument(f"no sampler is called {name!r}; there are: {', '.join(sorted(SAMPLERS))}")
    try:
        params = msgpack.unpackb(request.sampler.params) if request.sampler.params else {}
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise InvalidArgument(f"sampler.params: not msgpack ({error})") from None
    if not isinstance(params, dict):
        raise InvalidArgument("sampler.params: expected a map")
    sampler.check(params)
    return sampler, params
