"""Claims by a budget of tokens: as many rows, in a sampler's order, as their lengths allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tqclient.errors import InvalidArgument
from tqserver.controller.core.samplers.base import Sampler, SampleRequest, Slots
from tqserver.controller.core.view import View

ROWS_FIRST: Final = 64
"""Rows that are looked at first; each further look takes four times as many."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits a claim by the sum of its rows' lengths.

    Attributes:
        max_tokens: the sum that no claim exceeds.
        field: whose lengths count.
    """

    max_tokens: int
    field: str

    def choose(self, sampler: Sampler, view: View, request: SampleRequest) -> Slots | None:
        """Returns the rows of a claim, or None when it must wait.

        It is full when the next row, or group, would exceed the budget, or when it has `request.batch_size` rows. The
        cost depends on the rows that the budget holds.

        Raises:
            InvalidArgument: a row, or a whole group, exceeds the budget alone; or the field has no lengths.
        """
        rows_max, rows = request.batch_size, max(ROWS_FIRST, sampler.unit_rows(view, request))
        while True:
            rows = min(rows, rows_max)
            slots = sampler.sample(view, request._replace(batch_size=rows, final=True))
            if slots is None:
                return None
            ends = self._ends(sampler, request, slots)
            sums = np.cumsum(request.samples.lengths_of(self.field, slots))[ends - 1]
            fitting = int(np.searchsorted(sums, self.max_tokens, side="right"))
            if not fitting:
                raise InvalidArgument(
                    f"sample {request.samples.ids[slots[0]]} (with its group, if it is whole) has {sums[0]} of "
                    f"{self.field!r} alone, but max_tokens is {self.max_tokens}"
                )
            chosen = slots[: ends[fitting - 1]]
            if fitting < len(ends) or sums[-1] == self.max_tokens:
                return chosen
            if rows >= min(rows_max, view.count):
                full = sampler.has(view, request._replace(batch_size=rows_max, final=False))
                return chosen if full or request.final else None
            rows *= 4

    @staticmethod
    def _ends(sampler: Sampler, request: SampleRequest, slots: Slots) -> Slots:
        """Returns where the claim may be cut: behind each row, or behind each group."""
        if not sampler.whole_groups(request.params):
            return np.arange(1, len(slots) + 1)
        groups = request.samples.group[slots]
        return np.append(np.flatnonzero(groups[1:] != groups[:-1]) + 1, len(slots))
