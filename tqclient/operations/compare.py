"""Telling a repeated put from a conflicting one: the same key with the same bytes has no effect."""

from __future__ import annotations

import numpy as np

from tqclient.codec import Layout, Part, Plan, read_column, same_rows
from tqclient.errors import DuplicateKey, SampleNotFound
from tqclient.info import PartitionRef
from tqclient.operations import read
from tqclient.operations.effects import Deadline, Operation, Work
from tqclient.state import ClientState


def equal_rows(
    state: ClientState, ref: PartitionRef, plan: Plan, duplicate: DuplicateKey, deadline: Deadline
) -> Operation[None]:
    """Returns when every row whose key exists brings the bytes that are there already.

    Args:
        state: of the client.
        ref: the partition.
        plan: of the put.
        duplicate: the controller's answer: rows of the put, and the samples that have their keys.
        deadline: of the put.

    Raises:
        DuplicateKey: some bring others; names them.
    """
    try:
        stored = yield from read.get(
            state, ref, list(duplicate.existing_ids), None, list(plan.forms), True, deadline.remaining()
        )
    except SampleNotFound:  # it lacks one of the fields, or was cleared in between
        raise duplicate from None
    chosen = np.asarray(duplicate.rows, np.int64)

    def differing() -> list[int]:
        block = state.allocate(plan.size_bytes)
        layout = Layout.parse(plan.write(block))
        same = np.ones(len(chosen), np.bool_)
        for name in plan.forms:
            part = Part(layout, chosen, lambda offset, length: block[offset : offset + length])
            same &= same_rows(
                read_column(name, [part], copy=True, allocate=state.allocate, form=ref.form(name)), stored.columns[name]
            )
        return [int(index) for index in np.flatnonzero(~same)]

    different = yield Work(differing)
    if different:
        rows = [duplicate.rows[index] for index in different]
        ids = [duplicate.existing_ids[index] for index in different]
        raise DuplicateKey(
            f"partition {ref.name!r}: row {rows[0]} has the key of sample {ids[0]}, but other bytes "
            f"({len(different)} such rows); use another key, or upsert=True to replace the sample's fields",
            ids=ids,
            rows=rows,
            existing_ids=ids,
        )
