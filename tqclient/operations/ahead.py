"""Reading ahead: a claim reads its block while the controller makes it durable, with the put that it waited for.

The controller tells of the block (`Preview`) when it sends the claim to the journal. What is read then is handed out
only if the reply to the claim names the very same bytes; else it is dropped, and everything is read as if there had
been no preview. So a preview, or what goes wrong while it is read, costs time at worst. Only blocks in mapped memory
are read ahead: that needs no call to anybody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import Column, Layout, make_jagged
from tqclient.operations.consumers import ConsumerRef
from tqclient.operations.effects import Deadline
from tqclient.operations.ranges import Wanted
from tqclient.operations.read import Holdings, fetch_and_decode
from tqclient.operations.replicas import Path
from tqclient.rows import RowSet, Run
from tqclient.samplers import Fifo
from tqclient.schema import Form
from tqclient.state import ClientState
from tqclient.wire.v1 import common_pb2
from tqclient.wire.v1 import controller_pb2 as pb

_UNNUMBERED = 0
"""Stands for the block's id, which it has only once it is there."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """A block that was read ahead.

    Attributes:
        block: as it was previewed.
        layout: of it.
        rows: of it, all, with ids that are not known yet.
        forms: of its fields in the partition, as far as they were known.
        columns: by field.
        holdings: what views of it need.
    """

    block: pb.BlockWrite
    layout: Layout
    rows: RowSet
    forms: Mapping[str, Form | None]
    columns: dict[str, Column]
    holdings: Holdings

    def is_what(self, rows: RowSet, forms: Mapping[str, Form | None]) -> bool:
        """Whether a claim that was granted is of this block, all of it, and of nothing else."""
        if len(rows.blocks) != 1 or list(rows.runs) != list(self.rows.runs) or forms != self.forms:
            return False
        block = next(iter(rows.blocks.values()))
        if list(block.extents) != list(self.block.extents) or block.directory not in (b"", self.block.directory):
            return False
        # The fields of one put have the same runs, one object for them all.
        placed = {id(runs): runs for runs in rows.runs.values()}
        return all(len(runs) == 1 and np.array_equal(runs[0].rows, _all(self.layout)) for runs in placed.values())


class ReadAhead:
    """What one claim has read ahead of its reply.

    Args:
        state: of the client.
        consumer: that claims.
        copy: False gives views.
        deadline: of the claim.
    """

    def __init__(self, state: ClientState, consumer: ConsumerRef, copy: bool, deadline: Deadline) -> None:
        self._state = state
        self._consumer = consumer
        self._copy = copy
        self._deadline = deadline
        self._found: _Read | None = None

    def preview(self, body: bytes) -> None:
        """Reads what an encoded `Preview` tells of, if it can be read at once."""
        self.drop()
        try:
            self._found = self._read(pb.Preview.FromString(body).block)
        except Exception as error:  # whatever it is: who reads the block once it is there meets it again
            _log.debug("%s: nothing was read ahead: %s", self._consumer.label, error)

    def take(self, rows: RowSet, holdings: Holdings) -> dict[str, Column] | None:
        """Returns the columns of rows that were granted; None when they were not what was read ahead.

        Args:
            rows: of the reply, whose fields the partition was told of.
            holdings: takes over what views need.
        """
        found, self._found = self._found, None
        if found is None or not found.is_what(rows, self._forms(found.columns)):
            self._close(found)
            return None
        found.rows.ids[:] = rows.ids  # for whoever finds damage in a view later
        holdings.fetched.extend(found.holdings.fetched)
        holdings.checks.update(found.holdings.checks)
        block_id = next(iter(rows.blocks))
        self._state.directories.put(block_id, found.layout, len(found.block.directory))
        return found.columns

    def drop(self) -> None:
        """Lets go of what was read, if anybody has not taken it."""
        found, self._found = self._found, None
        self._close(found)

    @staticmethod
    def _close(found: _Read | None) -> None:
        if found is not None:
            found.holdings.close()

    def _read(self, block: pb.BlockWrite) -> _Read | None:
        path = self._path(block)
        if path is None:
            return None
        layout = Layout.parse(block.directory)
        run = [Run(_UNNUMBERED, _all(layout))]
        rows = _unknown(layout.rows, dict.fromkeys(self._consumer.fields or layout.fields, run))
        forms = self._forms(rows.runs)
        holdings = Holdings()
        columns = fetch_and_decode(
            self._state,
            self._consumer.partition,
            rows,
            {_UNNUMBERED: layout},
            {},
            {_UNNUMBERED: path},
            self._copy,
            holdings,
            self._deadline,
        )
        make_jagged(columns.values())
        return _Read(block, layout, rows, forms, columns, holdings)

    def _path(self, block: pb.BlockWrite) -> Path | None:
        """Returns a path to memory that is mapped already."""
        for extent in block.extents:
            node = self._state.node_of(extent.arena)
            transport = None if node is None else self._state.paths.get(node)
            if node is not None and transport is not None and transport.mapped:
                return Path(transport, extent, node.name, spare=False)
        return None

    def _forms(self, fields: Mapping[str, Any]) -> dict[str, Form | None]:
        return {name: self._consumer.partition.form(name) for name in fields}


def read_ahead(
    state: ClientState,
    consumer: ConsumerRef,
    request: pb.ClaimRequest,
    wanted: Sequence[Wanted],
    copy: bool,
    deadline: Deadline,
) -> ReadAhead | None:
    """Returns what takes previews for a claim; None for one that may get a put's rows in another order, or in parts."""
    in_order = isinstance(consumer.sampler, Fifo) and consumer.topology is None
    if not in_order or request.max_tokens or wanted:
        return None
    return ReadAhead(state, consumer, copy, deadline)


def _all(layout: Layout) -> NDArray[np.int64]:
    return np.arange(layout.rows)


def _unknown(count: int, runs: dict[str, list[Run]]) -> RowSet:
    """Returns rows of which nothing is known but where they lie."""
    none = np.full(count, -1, np.int64)
    return RowSet(none, [], [], None, np.stack([none, none], axis=1), none, runs, {_UNNUMBERED: common_pb2.Block()})
