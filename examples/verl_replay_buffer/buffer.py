"""The replay buffer: which groups are complete, and which of them are fresh enough."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import tqclient.compat.transfer_queue as tq

POLL_SECONDS = 0.005
ENDED = ("finished", "failure")
"""What the key of a prompt says once no more samples of it come."""


class ReplayBuffer:
    """Looks at keys and tags alone; samples are read by who trains on them.

    Attributes:
        stale: keys of samples that were too old.
        failed: keys of samples of prompts with a session that failed.

    Args:
        partition: that it looks at.
        max_staleness: versions that the oldest token of a group may lag behind.
    """

    def __init__(self, partition: str, max_staleness: int) -> None:
        self._partition = partition
        self._max_staleness = max_staleness
        self.stale: list[str] = []
        self.failed: list[str] = []

    def sample(self, groups: int, version: int, timeout: float) -> list[tq.KVBatchMeta]:
        """Waits for groups that have ended, and removes what cannot be trained on.

        Args:
            groups: at most.
            version: of the trainer.
            timeout: seconds.

        Returns:
            One batch for each group, the stalest first.

        Raises:
            TimeoutError: not one had ended in time.
        """
        end = time.monotonic() + timeout
        while True:
            found = []
            for uid, (status, tags) in self._ended().items():
                if status == "failure":
                    self._give_up(uid, tags, self.failed)
                elif version - min(tag["min_version"] for tag in tags.values()) > self._max_staleness:
                    self._give_up(uid, tags, self.stale)
                else:
                    found.append(tq.KVBatchMeta(list(tags), list(tags.values()), self._partition))
            if found:
                return sorted(found, key=_oldest)[:groups]
            if time.monotonic() > end:
                raise TimeoutError(f"no group has ended in {timeout} s")
            time.sleep(POLL_SECONDS)

    def _ended(self) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Returns the groups whose prompt has ended: status, and tags by key."""
        listed = tq.kv_list(self._partition).get(self._partition, {})
        ended: dict[str, tuple[str, dict[str, Any]]] = {
            key: (tag["status"], {}) for key, tag in listed.items() if tag["status"] in ENDED
        }
        for key, tag in listed.items():
            uid = uid_of(key)
            if key != uid and uid in ended:
                ended[uid][1][key] = tag
        return ended

    def _give_up(self, uid: str, keys: Iterable[str], listed: list[str]) -> None:
        listed += keys
        tq.kv_clear([uid, *keys], self._partition)


def uid_of(key: str) -> str:
    """Returns the prompt that a key belongs to: `{uid}`, or `{uid}_{session}_{turn}`."""
    return key.split("_", maxsplit=1)[0]


def _oldest(group: tq.KVBatchMeta) -> Any:
    return min(tag["min_version"] for tag in group.tags), group.keys
