"""Which of the ready samples a claim gets. A new sampler is a class here and a line in `SAMPLERS`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Final

import msgpack

from tqclient.errors import InvalidArgument
from tqclient.limits import TAGS_BYTES_MAX
from tqclient.wire.v1 import controller_pb2
from tqserver.controller.core.samplers.base import Sampler, SampleRequest
from tqserver.controller.core.samplers.custom import Custom
from tqserver.controller.core.samplers.grouped import Group, SeqlenBalanced
from tqserver.controller.core.samplers.orders import Fifo, Lifo, Prioritized, Random

__all__ = ["OWN", "SAMPLERS", "Custom", "SampleRequest", "Sampler", "SeqlenBalanced", "load_entry_points", "sampler_of"]

_own = (Fifo(), Lifo(), Random(), Prioritized(), Group(), SeqlenBalanced())
SAMPLERS: Final[dict[str, Sampler]] = {sampler.name: sampler for sampler in _own}
OWN: Final = frozenset(SAMPLERS)
"""Names of the samplers that every controller has. The others, of users, may be gone when the journal is replayed."""
ENTRY_POINTS: Final = "tq.samplers"


def load_entry_points() -> list[str]:
    """Adds the samplers that users installed beside the controller; returns their names.

    Raises:
        InvalidArgument: one has the name of another, or is no sampler.
    """
    added = []
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name in SAMPLERS:
            raise InvalidArgument(f"entry point {entry.name!r} of {ENTRY_POINTS}: a sampler of that name exists")
        SAMPLERS[entry.name] = Custom(entry.name, entry.load())
        added.append(entry.name)
    return added


def name_of(request: controller_pb2.ClaimRequest) -> str:
    """Returns the name of a claim's sampler."""
    return request.sampler.name or "fifo"


def sampler_of(request: controller_pb2.ClaimRequest) -> tuple[Sampler, dict[str, Any]]:
    """Returns the sampler that a claim names, `fifo` when it names none, and its parameters.

    Raises:
        InvalidArgument: no sampler has that name, or its parameters are off.
    """
    named = request.sampler
    name = name_of(request)
    sampler = SAMPLERS.get(name)
    if sampler is None:
        raise InvalidArgument(f"no sampler is called {name!r}; there are: {', '.join(sorted(SAMPLERS))}")
    if len(named.params) > TAGS_BYTES_MAX:
        raise InvalidArgument(f"sampler.params: {len(named.params)} bytes, at most {TAGS_BYTES_MAX}")
    try:
        params = msgpack.unpackb(named.params) if named.params else {}
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise InvalidArgument(f"sampler.params: not msgpack ({error})") from None
    if not isinstance(params, dict):
        raise InvalidArgument("sampler.params: expected a map")
    sampler.check(params, request.batch_size)
    return sampler, params
