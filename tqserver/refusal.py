"""What a caller is refused with."""

from __future__ import annotations

import logging

from tqclient.errors import InternalError, TQError

_log = logging.getLogger(__name__)


def refusal(what: str, error: Exception) -> TQError:
    """Returns an error that a caller can be told.

    Args:
        what: failed.
        error: as it was raised. One that is no TQError is a fault of this software; the log gets its trace.
    """
    if isinstance(error, TQError):
        return error
    _log.error("%s failed", what, exc_info=error)
    return InternalError(f"{what}: {type(error).__name__}: a fault of the daemon's own; its log has the trace")
