"""The data plane of RL post-training, as its users see it: `import tqclient as tq`.

Names load when they are first used, so that a daemon which imports `tqclient.wire` never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqclient import aio as aio
    from tqclient import errors as errors
    from tqclient.channel import TLS as TLS
    from tqclient.client import Client as Client
    from tqclient.client import connect as connect
    from tqclient.codec import Records as Records
    from tqclient.consumer import Batch as Batch
    from tqclient.consumer import Consumer as Consumer
    from tqclient.errors import BackpressureTimeout as BackpressureTimeout
    from tqclient.errors import ClaimTimeout as ClaimTimeout
    from tqclient.errors import CorruptBlock as CorruptBlock
    from tqclient.errors import DuplicateKey as DuplicateKey
    from tqclient.errors import InternalError as InternalError
    from tqclient.errors import InvalidArgument as InvalidArgument
    from tqclient.errors import LeaseExpired as LeaseExpired
    from tqclient.errors import PartitionExists as PartitionExists
    from tqclient.errors import PartitionNotFound as PartitionNotFound
    from tqclient.errors import SampleNotFound as SampleNotFound
    from tqclient.errors import SchemaMismatch as SchemaMismatch
    from tqclient.errors import Sealed as Sealed
    from tqclient.errors import StorageFull as StorageFull
    from tqclient.errors import TopologyMismatch as TopologyMismatch
    from tqclient.errors import TQError as TQError
    from tqclient.errors import TransportUnavailable as TransportUnavailable
    from tqclient.errors import Unauthenticated as Unauthenticated
    from tqclient.errors import Unavailable as Unavailable
    from tqclient.errors import UnsupportedValue as UnsupportedValue
    from tqclient.errors import UnsupportedVersion as UnsupportedVersion
    from tqclient.info import ClusterInfo as ClusterInfo
    from tqclient.info import NodeInfo as NodeInfo
    from tqclient.info import PartitionInfo as PartitionInfo
    from tqclient.partition import Partition as Partition
    from tqclient.samplers import Fifo as Fifo
    from tqclient.samplers import Sampler as Sampler

_MODULES = ("aio", "errors")
_HOMES = {
    "tqclient.channel": ("TLS",),
    "tqclient.client": ("Client", "connect"),
    "tqclient.codec": ("Records",),
    "tqclient.consumer": ("Batch", "Consumer"),
    "tqclient.errors": (
        "BackpressureTimeout",
        "ClaimTimeout",
        "CorruptBlock",
        "DuplicateKey",
        "InternalError",
        "InvalidArgument",
        "LeaseExpired",
        "PartitionExists",
        "PartitionNotFound",
        "SampleNotFound",
        "SchemaMismatch",
        "Sealed",
        "StorageFull",
        "TQError",
        "TopologyMismatch",
        "TransportUnavailable",
        "Unauthenticated",
        "Unavailable",
        "UnsupportedValue",
        "UnsupportedVersion",
    ),
    "tqclient.info": ("ClusterInfo", "NodeInfo", "PartitionInfo"),
    "tqclient.partition": ("Partition",),
    "tqclient.samplers": ("Fifo", "Sampler"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted((*_MODULES, *_HOME_OF))  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tqclient.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'tqclient' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
