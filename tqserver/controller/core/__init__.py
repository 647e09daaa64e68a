"""The controller's pure core: see `Core`."""

from __future__ import annotations

from tqserver.controller.core.admission import Demand, Limit
from tqserver.controller.core.blocks import BlockRecord, Extent
from tqserver.controller.core.claims import Readiness
from tqserver.controller.core.core import Core, Outcome
from tqserver.controller.core.effects import (
    Effect,
    Freed,
    NodeAttached,
    PartitionGone,
    ReadinessChanged,
    RoomChanged,
    Sealed,
    SessionEnded,
    SessionOpened,
)

__all__ = [
    "BlockRecord",
    "Core",
    "Demand",
    "Effect",
    "Extent",
    "Freed",
    "Limit",
    "NodeAttached",
    "Outcome",
    "PartitionGone",
    "Readiness",
    "ReadinessChanged",
    "RoomChanged",
    "Sealed",
    "SessionEnded",
    "SessionOpened",
]
