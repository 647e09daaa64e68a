"""What a partition was registered with, and claims that are consumed as soon as they are granted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tqclient.compat.transfer_queue.lookup import Claimed
from tqclient.consumer import Consumer
from tqclient.errors import ClaimTimeout, InvalidArgument, Sealed, TQError
from tqclient.integrations.keyed import checked_names
from tqclient.partition import Partition
from tqclient.samplers import GroupSampler

METADATA: Final = "nemo_rl"
"""Under this name, a partition's metadata hold the declaration."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The arguments of `register_partition`.

    Attributes:
        fields: that will be written.
        num_samples: that are expected.
        consumer_tasks: that may claim; None: any.
        grpo_group_size: samples of a group; None: claims go by age alone.
        enums: vocabularies by field.
    """

    fields: list[str] = dataclasses.field(default_factory=list)
    num_samples: int = 0
    consumer_tasks: list[str] | None = None
    grpo_group_size: int | None = None
    enums: dict[str, list[str]] | None = None

    @classmethod
    def read(cls, part: Partition) -> Declaration:
        """Reads that of a partition; one that was not registered has none, and any task may claim."""
        return cls(**part.metadata.to_dict().get(METADATA, {}))

    def write(self, part: Partition) -> None:
        """Stores it with a partition."""
        part.metadata.update({METADATA: dataclasses.asdict(self)})

    def check(self, name: str) -> None:
        """Raises InvalidArgument when no field or no task is named, or a number is off."""
        checked_names(name, "fields", self.fields)
        checked_names(name, "consumer_tasks", self.consumer_tasks)
        if isinstance(self.num_samples, bool) or not isinstance(self.num_samples, int) or self.num_samples < 0:
            raise InvalidArgument(f"partition {name!r}: num_samples={self.num_samples!r}: expected an int, 0 or more")
        if self.grpo_group_size is not None:
            GroupSampler(self.grpo_group_size)

    def check_tasks(self, part: Partition, tasks: Sequence[str]) -> None:
        """Raises InvalidArgument when one of the tasks was not declared."""
        unknown = [] if self.consumer_tasks is None else [task for task in tasks if task not in self.consumer_tasks]
        if unknown:
            raise InvalidArgument(
                f"partition {part.name!r} has no tasks {unknown}, but {self.consumer_tasks}: name them in "
                "register_partition(consumer_tasks=...)"
            )

    def check_fields(self, part: Partition, fields: Sequence[str]) -> None:
        """Raises InvalidArgument when a field was neither written nor declared."""
        if self.consumer_tasks is None or set(fields) <= set(self.fields):
            return
        known = {*self.fields, *part.describe().fields}
        missing = [field for field in fields if field not in known]
        if missing:
            raise InvalidArgument(
                f"partition {part.name!r}: fields {missing} were neither written nor declared, so no sample is ever "
                "ready: name them in register_partition(fields=...)"
            )


def take(consumer: Consumer, size: int, wait: float) -> Claimed:
    """Takes samples, and waits until there are as many.

    Raises:
        ClaimTimeout: there were too few in time; nothing was taken.
        Sealed: the partition is sealed, and nothing is left.
        InvalidArgument: a sample has no key; nothing was taken.
    """
    claimed = Claimed(consumer, size, max(0.0, wait))
    try:
        keyless = [id_ for id_, key in zip(claimed.rows.ids, claimed.rows.keys, strict=True) if key is None]
        if keyless:
            raise InvalidArgument(f"{consumer._ref.label}: samples {keyless} have no key: put them with keys=")
        claimed.ack()
    except BaseException:
        claimed.abandon()
        raise
    return claimed


def take_ready(consumer: Consumer, most: int, step: int) -> list[Claimed]:
    """Takes what is ready, and waits for nothing.

    Claims are all or nothing, so it halves their size until one is granted: at most log2(most) refusals. An error is
    raised only while nothing was taken.

    Args:
        consumer: that takes.
        most: samples at most.
        step: takes a multiple of it.
    """
    taken: list[Claimed] = []
    size = most
    while True:
        try:
            taken.append(take(consumer, size, 0.0))
        except ClaimTimeout:
            size = size // 2 // step * step
        except Sealed:
            return taken
        except TQError:
            if not taken:
                raise
            return (
                taken  # they count as consumed: nobody else is given them; what failed fails again with the next claim
            )
        else:
            most -= len(taken[-1].rows.ids)
            size = min(size, most)
        if size < step:
            return taken


def group_of(sample_id: Any) -> Any:
    """Returns the id without its last `_g<number>`: the prompt's, as NeMo-RL names samples."""
    if not isinstance(sample_id, str):
        return sample_id
    prompt, mark, number = sample_id.rpartition("_g")
    return prompt if mark and number.isdecimal() and prompt else sample_id
