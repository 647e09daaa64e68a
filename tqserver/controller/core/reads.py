"""Reads of samples: which ones are meant, and the pins that keep their blocks for the reader."""

from __future__ import annotations

import numpy as np

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument, SampleNotFound
from tqclient.wire.packing import U64, unpack_array
from tqclient.wire.v1 import controller_pb2
from tqserver.controller.core import limits, validate
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.samples import Slots
from tqserver.controller.core.state import State


def hold(state: State, session: int, held: bytes) -> None:
    """Takes pins again: those of before a start died with the controller that gave them.

    Args:
        state: of the controller.
        session: that held them, and holds them yet.
        held: packed uint64 [n, 2]: pin that the client chose, block that it covers. Pins that are held already and
            blocks that are gone are passed over.

    Raises:
        LeaseExpired: the session has ended.
        InvalidArgument: it would hold too many pins, or these are malformed, or too many.
    """
    pins = state.leases.session(session).pins
    fresh: dict[int, dict[int, None]] = {}
    pairs = unpack_array(held, U64, what="held_pins", columns=2)
    if len(pairs) > limits.HELD_PAIRS_MAX:
        raise InvalidArgument(f"held_pins: {len(pairs)} blocks of them, at most {limits.HELD_PAIRS_MAX}")
    for pin, block_id in pairs.tolist():
        if pin not in pins and pin < limits.PIN_CHOSEN_MAX and state.blocks.get(block_id) is not None:
            fresh.setdefault(pin, {})[block_id] = None
    if len(pins) + len(fresh) > limits.PINS_PER_SESSION_MAX:
        raise InvalidArgument(f"session {session} holds {limits.PINS_PER_SESSION_MAX} read pins, the most")
    for pin, block_ids in fresh.items():
        pins[pin] = list(block_ids)
        state.blocks.pin(block_ids)


def located(partition: Partition, request: controller_pb2.LocateRequest) -> Slots:
    """Returns the samples that a request names by ids or keys.

    Raises:
        SampleNotFound: some do not exist.
        InvalidArgument: it is malformed.
    """
    if not request.HasField("keys"):
        return partition.find(validate.sample_ids(request.ids))
    if request.ids:
        raise InvalidArgument("samples are looked up by ids or by keys, not by both")
    keys = validate.sample_keys(request.keys)
    slots = partition.samples.find_keys(keys)
    missing = np.flatnonzero(slots < 0)[: wire_limits.ERROR_IDS_MAX].tolist()
    if missing:
        shown = ", ".join(repr(keys[row]) for row in missing[:8])
        raise SampleNotFound(
            f"{partition}: {int(np.count_nonzero(slots < 0))} of {len(keys)} keys have no sample: {shown}"
            f"{partition.gone_note()}",
            rows=missing,
        )
    return slots


def check_written(partition: Partition, slots: Slots, fields: tuple[str, ...]) -> None:
    """Raises SampleNotFound when a field does not exist, or is not written for all of the samples."""
    for name in fields:
        column = partition.samples.columns.get(name)
        if column is None:
            known = ", ".join(partition.samples.columns) or "none yet"
            raise SampleNotFound(f"{partition} has no field {name!r}; its fields: {known}")
        unwritten = np.flatnonzero(column.block[slots] == 0)
        if len(unwritten):
            rows = unwritten[: wire_limits.ERROR_IDS_MAX]
            raise SampleNotFound(
                f"{partition}: field {name!r} is not written for {len(unwritten)} of {len(slots)} samples",
                ids=partition.samples.ids[slots[rows]].tolist(),
                rows=rows.tolist(),
            )
