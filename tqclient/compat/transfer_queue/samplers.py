"""The samplers that `init` can be given. The controller picks the samples; these say how.

A sampler of a user's own is not called here: it belongs into the controller's installation, as an entry point of the
group `tq.samplers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tqclient import samplers as native
from tqclient.compat.transfer_queue.tags import decode
from tqclient.errors import InvalidArgument

LENGTH_TAG = "total_lengths"
"""Tag that `SeqlenBalancedSampler` goes by, as in the original; a sample without it counts as 1."""


class BaseSampler:
    """How samples are picked.

    Attributes:
        ranked: whether ranks of one number get the same batch under one number.
        group_size: samples of a prompt, which stay together.
        dp_size: ranks that a global batch is divided over; 1: each rank takes a batch of its own.
    """

    ranked: ClassVar[bool] = False
    group_size: int = 1
    dp_size: int = 1

    @property
    def params(self) -> dict[str, int]:
        """What the sampler was made with, so that other processes make the same one."""
        return {}

    def native(self) -> native.Sampler:
        """Returns how the controller picks for it."""
        return native.Fifo() if self.group_size == 1 else native.GroupSampler(self.group_size)

    def divide(self, tags: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Divides the rows of a claimed batch over the ranks.

        Returns:
            Positions of the rows, for each rank.
        """
        return [list(range(len(tags)))]


class SequentialSampler(BaseSampler):
    """The samples that were put first; whoever asks takes the next ones."""


class RankAwareSampler(BaseSampler):
    """The samples that were put first; ranks with one `dp_rank` get the same batch under one `batch_index`."""

    ranked = True


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of `n_samples_per_prompt` samples.

    Samples that one client puts one after the other belong together: the first n, the next n, and so on, whether by
    one put or several. With `dp_rank` and `batch_index`, ranks of one number get the same batch.
    """

    ranked = True

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        """Raises ValueError when there is no such group."""
        self.group_size = _positive("n_samples_per_prompt", n_samples_per_prompt)

    @property
    def params(self) -> dict[str, int]:
        """The size of a group."""
        return {"n_samples_per_prompt": self.group_size}


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, dealt out to `dp_size` ranks so that the sums of their tags `total_lengths` are about equal.

    Each rank gets `batch_size` samples.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        """Raises ValueError when there are no such groups or ranks."""
        super().__init__(n_samples_per_prompt)
        self.dp_size = _positive("dp_size", dp_size)

    @property
    def params(self) -> dict[str, int]:
        """The size of a group and the number of ranks."""
        return {**super().params, "dp_size": self.dp_size}

    def divide(self, tags: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Divides whole groups; each rank gets as many.

        Raises:
            InvalidArgument: a tag `total_lengths` is no number.
        """
        size = self.group_size
        lengths = [_length(decode(tag).get(LENGTH_TAG, 1)) for tag in tags]
        sums = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
        return [
            [group * size + member for group in groups for member in range(size)]
            for groups in balance(sums, self.dp_size)
        ]


def balance(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Divides items into parts of one size (some have one less when it doesn't divide), with sums about equal.

    The items are dealt out in rounds, heaviest round first: in each, the lightest part gets the heaviest item. Then
    pairs of items change places between the heaviest and the lightest part while that brings the two closer.

    Args:
        weights: of the items.
        parts: how many.

    Returns:
        Numbers of the items, for each part, ascending.
    """
    order = sorted(range(len(weights)), key=lambda item: -weights[item])
    dealt: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for start in range(0, len(order), parts):
        lightest = sorted(range(parts), key=lambda part: sums[part])
        for item, part in zip(order[start : start + parts], lightest, strict=False):
            dealt[part].append(item)
            sums[part] += weights[item]
    while parts > 1:
        low, high = min(range(parts), key=sums.__getitem__), max(range(parts), key=sums.__getitem__)
        gap = sums[high] - sums[low]
        moves = [
            (abs(gap - 2 * (weights[one] - weights[other])), one, other)
            for one in dealt[high]
            for other in dealt[low]
            if 0 < weights[one] - weights[other] < gap
        ]
        if not moves:
            break
        _, one, other = min(moves)
        dealt[high].remove(one)
        dealt[low].remove(other)
        dealt[high].append(other)
        dealt[low].append(one)
        moved = weights[one] - weights[other]
        sums[high] -= moved
        sums[low] += moved
    return [sorted(part) for part in dealt]


SAMPLERS: dict[str, type[BaseSampler]] = {
    kind.__name__: kind for kind in (SequentialSampler, RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler)
}


def make(sampler: Any, params: Mapping[str, Any] | None = None) -> BaseSampler:
    """Returns a sampler from what `init` was given: one, its class, or its name.

    Raises:
        InvalidArgument: it is none of the four.
    """
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        sampler = sampler()
    if isinstance(sampler, BaseSampler) and type(sampler) in SAMPLERS.values():
        return sampler
    kind = SAMPLERS.get(sampler) if isinstance(sampler, str) else None
    if kind is None:
        raise InvalidArgument(
            f"sampler {sampler!r}: expected one of {', '.join(SAMPLERS)}; one of your own is installed beside the "
            "controller, as an entry point of the group tq.samplers, and named by tqclient.Sampler"
        )
    return kind(**dict(params or {}))


def _length(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(
            f"SeqlenBalancedSampler: a sample has the tag {LENGTH_TAG!r}={value!r:.80}: expected a number; set another"
        ) from None


def _positive(what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{what}={value!r}: expected an int of 1 or more")
    return value
