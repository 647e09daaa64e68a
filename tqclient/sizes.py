"""Sizes as people write them: `64GiB`."""

from __future__ import annotations

import re
from typing import Final

from tqclient.errors import InvalidArgument

_UNITS: Final = {"": 1, "b": 1}
_UNITS.update({f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)})
_UNITS.update({f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)})
_SIZE: Final = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.IGNORECASE)


def size_bytes(size: int | str, *, what: str) -> int:
    """Returns a size in bytes.

    Args:
        size: bytes, or text such as `4096`, `64MiB`, `1.5GiB`, `10GB`.
        what: name of the argument, for the error.

    Raises:
        InvalidArgument: it is neither, or no whole number of bytes above 0.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        factor = _UNITS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise InvalidArgument(f"{what}={size!r} is no size; write 4096, '64MiB' or '1.5GiB'")
        exact = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    else:
        exact = size
    if isinstance(exact, bool) or not isinstance(exact, int | float) or not 0 < exact < 1 << 63 or exact != int(exact):
        raise InvalidArgument(f"{what}={size!r:.80}: give a whole number of bytes above 0 and below 2**63")
    return int(exact)
