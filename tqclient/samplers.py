"""How a claim picks among the samples that are ready. The controller does the picking; here a user names the way.

What each does with late, aborted and oversampled members of groups, and with a last short batch, is in
`docs/consumption.md`.
"""

from __future__ import annotations

from typing import Any

import msgpack

from tqclient import limits
from tqclient.arguments import name_of
from tqclient.errors import InvalidArgument
from tqclient.wire.v1 import controller_pb2


class Sampler:
    """A way to pick samples; `Sampler("mine", alpha=0.5)` names one that was installed beside the controller.

    Attributes:
        name: which of the controller's samplers is meant: its own, or an entry point of the group `tq.samplers`.
        params: its parameters, as they were given.
    """

    def __init__(self, name: str, /, **params: Any) -> None:
        """Makes no call: the controller answers the claim of a sampler that it does not know with InvalidArgument.

        Args:
            name: of the sampler.
            params: whatever msgpack can say.

        Raises:
            InvalidArgument: a parameter cannot be sent.
        """
        self.name = name_of(name, what="sampler")
        self.params = params
        try:
            self._packed: bytes = msgpack.packb(params)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"sampler {name!r}: parameters that cannot be sent: {error}") from None

    def to_wire(self) -> controller_pb2.Sampler:
        """Returns the sampler as a claim carries it."""
        return controller_pb2.Sampler(name=self.name, params=self._packed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sampler):
            return NotImplemented
        return (self.name, self._packed) == (other.name, other._packed)

    def __hash__(self) -> int:
        return hash((self.name, self._packed))

    def __repr__(self) -> str:
        params = "".join(f", {name}={value!r}" for name, value in self.params.items())
        return f"Sampler({self.name!r}{params})"


class Fifo(Sampler):
    """The samples that were put first. One that is delivered again comes before newer ones."""

    def __init__(self) -> None:
        super().__init__("fifo")


class Lifo(Sampler):
    """The freshest samples first."""

    def __init__(self) -> None:
        super().__init__("lifo")


class Random(Sampler):
    """Any of the ready samples, each as likely; the same seed and the same history of claims draw the same."""

    def __init__(self, seed: int = 0) -> None:
        """Args: `seed`: an int of 64 bits."""
        super().__init__("random", seed=_int(seed, "Random: seed", -(1 << 63), (1 << 63) - 1))


class Prioritized(Sampler):
    """The highest number under a tag first, the older one of equals; samples without a number come last."""

    def __init__(self, tag: str) -> None:
        """Args: `tag`: its name. `Partition.set_tags` changes a priority, of a ready sample too."""
        super().__init__("prioritized", tag=name_of(tag, what="Prioritized: tag"))


class GroupSampler(Sampler):
    """Complete groups alone, the oldest first, whatever the order in which their members arrived.

    The rows of a group lie side by side in the batch, by age. Members beyond the size (oversampled, or late) are
    dropped for the consumer once their group was granted; one whose tag `aborted` is true does not count.
    """

    def __init__(self, size: int | None = None) -> None:
        """Names the size.

        Args:
            size: members of a group; `batch_size` is a multiple of it. None: a group is complete when it has as many
                members as their tag `group_size` says. A claim then waits until complete groups have `batch_size` rows
                together, and gets as many whole groups as fit.
        """
        bounded = None if size is None else _int(size, "GroupSampler: size", 1, limits.ROWS_PER_CLAIM_MAX)
        super().__init__("group", size=bounded)


class SeqlenBalanced(Sampler):
    """The oldest `dp × batch_size` samples, divided over the DP ranks of the consumer's topology.

    Each DP rank gets `batch_size` of them, and the sums of the field's lengths are as equal as they get. The lengths
    are those of the stored rows: nobody supplies them.
    """

    def __init__(self, field: str, groups: bool | int = False) -> None:
        """Names the field.

        Args:
            field: whose lengths (leading dimensions) count; `images.pixels` is a child of a struct.
            groups: keep groups whole: an int is their size, True goes by their tag `group_size`, as `GroupSampler`.
        """
        if not isinstance(groups, bool):
            groups = _int(groups, "SeqlenBalanced: groups", 1, limits.ROWS_PER_CLAIM_MAX)
        super().__init__("seqlen_balanced", field=name_of(field, what="SeqlenBalanced: field"), groups=groups)


def _int(value: object, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(f"{what}={value!r}: expected an int from {low} to {high}")
    return value
