"""What every sampler is, and what it may look at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument
from tqserver.controller.core.consumer import Consumer
from tqserver.controller.core.groups import GroupIndex
from tqserver.controller.core.samples import SampleTable
from tqserver.controller.core.view import View

Slots = NDArray[np.int64]


class SampleRequest(NamedTuple):
    """What a claim asks of a sampler, and what the sampler may know besides the view.

    Attributes:
        batch_size: rows wanted.
        final: no further sample will become ready: what is left may be handed out, however little.
        params: of the sampler.
        samples: of the partition; not to be changed.
        consumer: that asks; not to be changed.
    """

    batch_size: int
    final: bool
    params: dict[str, Any]
    samples: SampleTable
    consumer: Consumer

    def of_size(self, batch_size: int) -> SampleRequest:
        """Returns the same for another number of rows."""
        return self._replace(batch_size=batch_size)


class Sampler(ABC):
    """Chooses rows. What it answers depends on durable state and the request alone, so that a replay answers alike.

    Attributes:
        countable: any `batch_size` ready rows make a batch.
        known: the parameters that it takes.
    """

    countable = True
    known: tuple[str, ...] = ()

    def check(self, params: dict[str, Any], batch_size: int) -> None:
        """Raises InvalidArgument for parameters that this sampler does not know, or that are off.

        Args:
            params: as the claim has them.
            batch_size: of the claim; 0: not limited.
        """
        if not params:
            return
        unknown = sorted(map(str, params.keys() - set(self.known)))
        if unknown:
            takes = f"the parameters {', '.join(self.known)}" if self.known else "no parameters"
            raise InvalidArgument(f"the {self.name} sampler takes {takes}, not {', '.join(unknown)}")

    @property
    def name(self) -> str:
        """As claims name it."""
        return type(self).__name__.lower()

    def whole_groups(self, params: dict[str, Any]) -> bool:
        """Whether it hands out complete groups alone: their rows lie side by side in what it chooses."""
        return False

    def ranked_by(self, params: dict[str, Any]) -> str | None:
        """Returns the tag by whose numbers it ranks samples, if it does."""
        return None

    def unit_rows(self, view: View, request: SampleRequest) -> int:
        """Returns the rows that the next claim has at least, once there is something to hand out."""
        return 1

    def has(self, view: View, request: SampleRequest) -> bool:
        """Says, at little cost, whether `sample` would choose rows."""
        return view.count >= request.batch_size or (request.final and view.count > 0)

    @abstractmethod
    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """Returns ready slots in delivery order (int64, at least one), or None when the claim must wait."""

    def surplus(self, slots: Slots, request: SampleRequest) -> Slots:
        """Returns slots (each once) that are given up for this consumer because these are granted."""
        return np.empty(0, dtype=np.int64)


def text(name: str, params: dict[str, Any], key: str) -> str:
    """Returns a parameter that must be a string; raises InvalidArgument."""
    value = params.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"the {name} sampler needs {key}: a name, not {value!r}")
    return value


def group_index(view: View, request: SampleRequest, size: int | None) -> GroupIndex:
    """Returns which groups are complete."""
    return request.consumer.groups(view, size)
