"""The data plane of RL post-training, as its users see it: `import tqclient as tq`.

Names load when they are first used, so that a daemon which imports `tqclient.wire` never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqclient import aio as aio
    from tqclient import errors as errors
    from tqclient import topology as topology
    from tqclient import torch as torch
    from tqclient.changes import Changed as Changed
    from tqclient.changes import Listed as Listed
    from tqclient.changes import Removed as Removed
    from tqclient.changes import Settled as Settled
    from tqclient.changes import Tagged as Tagged
    from tqclient.changes import Written as Written
    from tqclient.channel import TLS as TLS
    from tqclient.client import Client as Client
    from tqclient.client import connect as connect
    from tqclient.codec import Records as Records
    from tqclient.codec import Shared as Shared
    from tqclient.consumer import Batch as Batch
    from tqclient.consumer import Consumer as Consumer
    from tqclient.counters import Traffic as Traffic
    from tqclient.errors import BackpressureTimeout as BackpressureTimeout
    from tqclient.errors import ClaimTimeout as ClaimTimeout
    from tqclient.errors import CorruptBlock as CorruptBlock
    from tqclient.errors import DuplicateKey as DuplicateKey
    from tqclient.errors import InternalError as InternalError
    from tqclient.errors import InvalidArgument as InvalidArgument
    from tqclient.errors import LeaseExpired as LeaseExpired
    from tqclient.errors import PartitionExists as PartitionExists
    from tqclient.errors import PartitionNotFound as PartitionNotFound
    from tqclient.errors import ProducersGone as ProducersGone
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
    from tqclient.permit import Permit as Permit
    from tqclient.policy import SamplesPerInsert as SamplesPerInsert
    from tqclient.samplers import Fifo as Fifo
    from tqclient.samplers import GroupSampler as GroupSampler
    from tqclient.samplers import Lifo as Lifo
    from tqclient.samplers import Prioritized as Prioritized
    from tqclient.samplers import Random as Random
    from tqclient.samplers import Sampler as Sampler
    from tqclient.samplers import SeqlenBalanced as SeqlenBalanced
    from tqclient.topology import Topology as Topology
    from tqclient.writer import Writer as Writer

_MODULES = ("aio", "errors", "topology", "torch")
_HOMES = {
    "tqclient.changes": ("Changed", "Listed", "Removed", "Settled", "Tagged", "Written"),
    "tqclient.channel": ("TLS",),
    "tqclient.client": ("Client", "connect"),
    "tqclient.codec": ("Records", "Shared"),
    "tqclient.consumer": ("Batch", "Consumer"),
    "tqclient.counters": ("Traffic",),
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
        "ProducersGone",
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
    "tqclient.permit": ("Permit",),
    "tqclient.policy": ("SamplesPerInsert",),
    "tqclient.samplers": (
        "Fifo",
        "GroupSampler",
        "Lifo",
        "Prioritized",
        "Random",
        "Sampler",
        "SeqlenBalanced",
    ),
    "tqclient.topology": ("Topology",),
    "tqclient.writer": ("Writer",),
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
