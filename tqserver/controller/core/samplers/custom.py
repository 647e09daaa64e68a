"""Samplers that users bring, under the entry points `tq.samplers`.

Such a sampler has a method `sample(view, request) -> slots`, as `Sampler.sample`: it is asked once `batch_size` samples
are ready, or the last ones, and returns ready slots, each once, at most `request.batch_size` of them. It may have a
method `check(params)` that raises InvalidArgument. What it chose is journaled with the claim: it need not answer alike
twice, nor be installed any more when the journal is replayed. It is asked while no other claim of its consumer, which
might take the same samples, is on its way to the journal. One that raises fails that claim alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InternalError, InvalidArgument
from tqserver.controller.core.arrays import are_distinct
from tqserver.controller.core.samplers.base import Sampler, SampleRequest, Slots
from tqserver.controller.core.view import View


class Custom(Sampler):
    """A user's sampler, kept from harm.

    Args:
        name: of its entry point.
        sampler: what the entry point is, or makes when it is a class.
    """

    def __init__(self, name: str, sampler: Any) -> None:
        self._name = name
        self._sampler = sampler() if isinstance(sampler, type) else sampler
        if not callable(getattr(self._sampler, "sample", None)):
            raise InvalidArgument(f"sampler {name!r} has no method `sample`")

    @property
    def name(self) -> str:
        """Of the entry point."""
        return self._name

    def check(self, params: dict[str, Any], batch_size: int) -> None:
        """Asks the sampler, if it checks anything."""
        check = getattr(self._sampler, "check", None)
        if check is not None:
            self._call(check, params)

    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """Asks the sampler, and checks what it says.

        Raises:
            InternalError: it raised, or chose what it may not. Its own `Sealed` would be taken for the claim's answer.
        """
        if not self.has(view, request):
            return None
        chosen: NDArray[Any] = self._call(lambda: np.asarray(self._sampler.sample(view, request)))
        slots = chosen.astype(np.int64) if chosen.ndim == 1 and chosen.dtype.kind in "iu" else np.empty(0, np.int64)
        inside = len(slots) and slots.min() >= 0 and slots.max() < len(view.ready)
        if not inside or len(slots) > request.batch_size or not are_distinct(slots):
            raise InternalError(f"sampler {self._name!r}: expected 1 to {request.batch_size} slots, each once")
        if not view.ready[slots].all():
            raise InternalError(f"sampler {self._name!r} chose samples that are not ready")
        return slots

    def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except InvalidArgument:
            raise
        except Exception as error:
            raise InternalError(f"sampler {self._name!r} raised {error!r}") from error


class Journaled(Sampler):
    """Stands for a user's sampler while a claim is applied: what is not chosen in the journal is not chosen then."""

    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """Nothing: the claim goes back to its place, and is granted again with a choice."""
        return None
