"""Samplers that know of groups: complete ones alone, or a global batch balanced over DP ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arrays import begins, spread
from tqclient.errors import InvalidArgument
from tqserver.controller.core.arrays import counted, distinct
from tqserver.controller.core.consumer import OPEN, STALE
from tqserver.controller.core.samplers.balance import balanced, divided
from tqserver.controller.core.samplers.base import Sampler, SampleRequest, Slots, group_index, text
from tqserver.controller.core.view import View


def _size(name: str, value: Any, batch_size: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limits.ROWS_PER_CLAIM_MAX:
        raise InvalidArgument(
            f"the {name} sampler needs a group size from 1 to {limits.ROWS_PER_CLAIM_MAX}, not {value!r}"
        )
    if batch_size % value:
        raise InvalidArgument(f"batch_size={batch_size} is no multiple of the group size, {value}")
    return value


class WholeGroups(Sampler):
    """Complete groups alone, the oldest first; the others of a group that is granted are given up."""

    countable = False

    def size(self, params: dict[str, Any]) -> int | None:
        """Returns the members of a group; None: as tagged."""
        size: int | None = params.get("size")
        return size

    def whole_groups(self, params: dict[str, Any]) -> bool:
        """Always."""
        return True

    def unit_rows(self, view: View, request: SampleRequest) -> int:
        """The size of the oldest complete group."""
        return max(group_index(view, request, self.size(request.params)).first_size(), 1)

    def has(self, view: View, request: SampleRequest) -> bool:
        """Whether complete groups fill the batch, or there is a last one."""
        rows = group_index(view, request, self.size(request.params)).rows
        return rows >= request.batch_size or (request.final and rows > 0)

    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """The members of the oldest complete groups, group by group, each by age."""
        if not self.has(view, request):
            return None
        index = group_index(view, request, self.size(request.params))
        groups, sizes = index.oldest(request.batch_size)
        if not len(groups):
            raise InvalidArgument(
                f"batch_size={request.batch_size}, but the oldest complete group has {index.first_size()} members"
            )
        members = request.samples.members(groups)
        ready: Slots = members[view.ready[members]]
        return ready[spread(np.flatnonzero(begins(request.samples.group[ready])), sizes)]  # the oldest of each group

    def surplus(self, slots: Slots, request: SampleRequest) -> Slots:
        """The other members of the groups, but those that are settled."""
        samples, consumer = request.samples, request.consumer
        rest = np.setdiff1d(samples.members(distinct(samples.group[slots])), slots)
        unsettled: Slots = rest[(consumer.state[rest] == OPEN) | (consumer.state[rest] == STALE)]
        return unsettled


class Group(WholeGroups):
    """See `WholeGroups`."""

    known = ("size",)

    def check(self, params: dict[str, Any], batch_size: int) -> None:
        """`size`: members of a group; nil: as many as their tag `group_size` says."""
        super().check(params, batch_size)
        _size(self.name, params.get("size"), batch_size)


class SeqlenBalanced(WholeGroups):
    """The oldest samples, or groups, divided over DP ranks in equal counts with balanced sums of a field's lengths."""

    known = ("field", "groups")

    @property
    def name(self) -> str:
        """As claims name it."""
        return "seqlen_balanced"

    def check(self, params: dict[str, Any], batch_size: int) -> None:
        """`field`: whose lengths count; `groups`: keep groups whole, of the size that is given or, true, as tagged."""
        super().check(params, batch_size)
        text(self.name, params, "field")
        if not isinstance(params.get("groups", False), bool):
            _size(self.name, params["groups"], batch_size)

    def size(self, params: dict[str, Any]) -> int | None:
        """Returns the members of a group; None: as tagged."""
        groups = params.get("groups")
        return None if isinstance(groups, bool) else groups

    def whole_groups(self, params: dict[str, Any]) -> bool:
        """If asked for."""
        return bool(params.get("groups"))

    def unit_rows(self, view: View, request: SampleRequest) -> int:
        """One, or the size of the oldest complete group."""
        return super().unit_rows(view, request) if self.whole_groups(request.params) else 1

    def has(self, view: View, request: SampleRequest) -> bool:
        """Whether a whole batch is ready, or the last, short one."""
        return super().has(view, request) if self.whole_groups(request.params) else Sampler.has(self, view, request)

    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """The oldest samples, or complete groups."""
        if self.whole_groups(request.params):
            return super().sample(view, request)
        return view.first(request.batch_size) if self.has(view, request) else None

    def surplus(self, slots: Slots, request: SampleRequest) -> Slots:
        """The other open members of the groups, if they are kept whole."""
        return super().surplus(slots, request) if self.whole_groups(request.params) else slots[:0]

    def divide(self, slots: Slots, request: SampleRequest, ranks: int) -> list[Slots]:
        """Divides what `sample` chose: int64 [rows] for each rank, in the order of `slots`; raises as `weights`."""
        weights = self.weights(slots, request)
        units = slots.reshape(len(weights), -1)
        return [part.ravel() for part in divided(units, balanced(weights, ranks), ranks)]

    def weights(self, slots: Slots, request: SampleRequest) -> NDArray[np.int64]:
        """Returns the lengths of what is not divided further: int64 [n], of rows or of groups.

        Raises:
            InvalidArgument: the field has no lengths, or groups of several sizes are to be kept whole.
        """
        lengths = request.samples.lengths_of(request.params["field"], slots)
        unit = 1
        if self.whole_groups(request.params):
            _, sizes = counted(request.samples.group[slots])
            unit = int(sizes[0])
            if (sizes != unit).any():
                raise InvalidArgument(f"groups of {sizes.min()} and {sizes.max()} members cannot be divided equally")
        weights: NDArray[np.int64] = lengths.reshape(-1, unit).sum(axis=1)
        return weights
