"""Which block directories each session was sent: a directory travels once, and the client keeps it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tqclient import limits
from tqclient.errors import LeaseExpired, SampleNotFound
from tqclient.wire.packing import U64, pack_blobs, unpack_array
from tqclient.wire.v1 import common_pb2
from tqserver.controller.core import Core
from tqserver.controller.core.runs import blocks_of

SENT_PER_SESSION_MAX: Final = 16_384
"""Blocks that a session is known to have been sent; a client should cache about as many."""
ROWS_REPLY_BYTES_MAX: Final = limits.MESSAGE_BYTES_MAX - limits.MIB
"""Directories that would make a reply larger are left out: the client asks for them."""

DIRECTORIES_PER_REPLY_MAX: Final = limits.ROWS_PER_CLAIM_MAX
"""Of one GetDirectories; the client asks again for the rest. So many are looked up in a twentieth of a second."""


class Directories:
    """Fills in the blocks of replies.

    Args:
        core: that knows the blocks.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._sent: dict[int, OrderedDict[int, None]] = {}

    def fill_in(self, session: int, rows: common_pb2.Rows) -> None:
        """Adds each block that the placements point into, with its directory if the session was not sent it before.

        Raises:
            LeaseExpired: a block is gone: the reply is a recorded one, and its claim has ended.
        """
        sent = self._sent_to(session)
        placed: set[int] = set()
        for placement in rows.placements:
            placed.update(blocks_of(placement))
        self._drop_gone(sent, 1 + len(placed))  # more than are added: it catches up
        room = -1
        for block_id in sorted(placed):
            record = self._core.block(block_id)
            if record is None:
                raise LeaseExpired(
                    f"block {block_id} of this reply is gone: the claim ended before it was asked for again"
                )
            block = rows.blocks.add(block_id=block_id)
            for node, arena, offset, length, generation in record.extents:
                block.extents.add(node=node, arena=arena, offset=offset, length=length, generation=generation)
            if block_id in sent:
                sent.move_to_end(block_id)
                continue
            room = ROWS_REPLY_BYTES_MAX - rows.ByteSize() if room < 0 else room
            if len(record.directory) <= room:
                block.directory = record.directory
                room -= len(record.directory)
                self._note(sent, block_id)

    def _sent_to(self, session: int) -> OrderedDict[int, None]:
        """Returns the blocks that a session was sent."""
        sent = self._sent.get(session)
        if sent is None:
            sent = OrderedDict()
            # A recorded reply may be asked for when its session has ended: nothing would remove an entry made then.
            if self._core.is_live(session):
                self._sent[session] = sent
        return sent

    def _drop_gone(self, sent: OrderedDict[int, None], looks: int) -> None:
        """Forgets blocks that are gone. It looks at a few each time, in turns."""
        for _ in range(min(looks, len(sent))):
            block_id, _ = sent.popitem(last=False)
            if self._core.block(block_id) is not None:
                sent[block_id] = None

    def get(self, session: int, block_ids: bytes) -> common_pb2.Packed:
        """Returns directories in the order asked for: as many, from the first on, as one reply has room and time for.

        Raises:
            SampleNotFound: a block is gone.
        """
        sent = self._sent_to(session)
        found: list[bytes] = []
        room = ROWS_REPLY_BYTES_MAX
        for block_id in unpack_array(block_ids, U64, what="block_ids")[:DIRECTORIES_PER_REPLY_MAX].tolist():
            record = self._core.block(block_id)
            if record is None:
                raise SampleNotFound(
                    f"block {block_id} is gone: its samples were cleared, and nothing holds it for you"
                )
            room -= len(record.directory)
            if room < 0:
                break
            found.append(record.directory)
            self._note(sent, block_id)
        return pack_blobs(found)

    @staticmethod
    def _note(sent: OrderedDict[int, None], block_id: int) -> None:
        sent[block_id] = None
        if len(sent) > SENT_PER_SESSION_MAX:
            sent.popitem(last=False)

    def session_ended(self, session: int) -> None:
        """Forgets a session."""
        self._sent.pop(session, None)
