"""Samplers that take single rows in some order."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument
from tqserver.controller.core.samplers.base import Sampler, SampleRequest, Slots, text
from tqserver.controller.core.view import View

DENSITY_MIN: Final = 1 / 8
"""With fewer ready slots than this share of all, a random sampler lists them rather than trying slots blindly."""
ROUNDS_MAX: Final = 64


class Fifo(Sampler):
    """The oldest samples first; one that is delivered again comes before newer ones."""

    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """The lowest ready slots."""
        return view.first(request.batch_size) if self.has(view, request) else None


class Lifo(Sampler):
    """The freshest samples first."""

    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """The highest ready slots, descending."""
        return view.last(request.batch_size) if self.has(view, request) else None


class Random(Sampler):
    """Any of the ready samples, each as likely. The seed and the consumer's number of grants decide."""

    known = ("seed",)

    def check(self, params: dict[str, Any], batch_size: int) -> None:
        """`seed`: an int; 0 when it is left out."""
        super().check(params, batch_size)
        seed = params.get("seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise InvalidArgument(f"the random sampler needs seed: an int, not {seed!r}")

    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """Slots drawn without replacement, in the order in which they were drawn."""
        if not self.has(view, request):
            return None
        rows, size = min(request.batch_size, view.count), request.samples.size
        seed = int(request.params.get("seed", 0)) & (1 << 64) - 1
        stream = _mix(np.array([seed], dtype=np.uint64) + _mix(np.array([request.consumer.grants], dtype=np.uint64)))[0]
        if view.count < size * DENSITY_MIN or rows > view.count // 2:
            candidates = np.flatnonzero(view.ready[:size])
            return candidates[np.argsort(_numbers(stream, 0, len(candidates)), kind="stable")[:rows]]
        # A try meets a ready slot in one of `size / count` times, and at least every other one of those is unused.
        width = 2 * rows * -(-size // view.count)
        chosen = np.empty(0, dtype=np.int64)
        for turn in range(ROUNDS_MAX):
            tries = (_numbers(stream, turn * width, width) % np.uint64(size)).astype(np.int64)
            chosen = np.concatenate([chosen, tries[view.ready[tries]]])
            _, first = np.unique(chosen, return_index=True)
            chosen = chosen[np.sort(first)]
            if len(chosen) >= rows:
                return chosen[:rows]
        raise AssertionError(f"{ROUNDS_MAX} rounds of draws met {len(chosen)} of {rows} rows")


def _numbers(stream: np.uint64, start: int, count: int) -> NDArray[np.uint64]:
    """Returns numbers of a stream: the same on every machine and under every version of numpy."""
    return _mix(np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + stream)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finalizer of splitmix64 (Steele, Lea and Flood, 2014); arrays of uint64 wrap around in silence.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Prioritized(Sampler):
    """The highest number under a tag first, the older one of equals; samples without a number last."""

    known = ("tag",)

    def check(self, params: dict[str, Any], batch_size: int) -> None:
        """`tag`: its name."""
        super().check(params, batch_size)
        text(self.name, params, "tag")

    def ranked_by(self, params: dict[str, Any]) -> str | None:
        """Returns `tag`."""
        tag: str = params["tag"]
        return tag

    def sample(self, view: View, request: SampleRequest) -> Slots | None:
        """Slots by descending number, then ascending."""
        if not self.has(view, request):
            return None
        tag, samples = request.params["tag"], request.samples
        index = request.consumer.priorities(view, tag)
        return index.highest(view.ready, samples.numbers(tag), samples.size, min(request.batch_size, view.count))
