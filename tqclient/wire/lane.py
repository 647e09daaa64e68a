"""The frames of a lane: one connection, one call at a time. `lane.proto` says what it is for, and how it is found.

    the daemon sends     challenge, 32 bytes
    the client sends     challenge, 32 bytes; proof of the daemon's, 32 bytes
    the daemon sends     proof of the client's, 32 bytes
    then, in turns:
    the client sends     body length uint32, milliseconds uint32, name length uint8; the method's name; the request
    the daemon sends     body length uint32, status uint8; the reply, or an ErrorDetail; ahead of it, to who asked for
                         that, any number of previews of it

Numbers are little-endian. A method's name is that of gRPC: `/tq.v1.Controller/Commit`. Milliseconds are those that the
client will wait; 0xffffffff is for ever. Whoever is disappointed closes the connection: a call under way is cancelled
by that, and its outcome is unknown, as when a gRPC connection breaks.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

REQUEST: Final = struct.Struct("<IIB")
REPLY: Final = struct.Struct("<IB")
OK: Final = 0
FAILED: Final = 1
PREVIEW: Final = 2
"""The statuses of what the daemon sends."""
CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = 32
FOR_EVER_MS: Final = (1 << 32) - 1


def proof(secret: bytes, side: str, challenge: bytes) -> bytes:
    """Returns what shows that one side, `client` or `daemon`, knows the secret, without telling it."""
    return hmac.digest(secret, side.encode() + challenge, "sha256")


def proves(offered: bytes, secret: bytes, side: str, challenge: bytes) -> bool:
    """Says whether that is the proof; takes the same time wherever the two differ."""
    return hmac.compare_digest(offered, proof(secret, side, challenge))


def request(name: bytes, body: bytes, timeout: float | None) -> bytes:
    """Returns the frame of a request.

    Args:
        name: of the method.
        body: the message.
        timeout: seconds that its client will wait; None is for ever.
    """
    wait_ms = FOR_EVER_MS if timeout is None else min(max(0, int(timeout * 1000)), FOR_EVER_MS)
    return REQUEST.pack(len(body), wait_ms, len(name)) + name + body
