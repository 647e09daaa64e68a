"""Tags of any kind: the service keeps numbers, strings and bytes as they are; other values are kept encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tqclient.codec import dumps, loads
from tqclient.errors import InvalidArgument, UnsupportedValue

ENCODED: Final = b"\x00tq\x00"
"""Begins a value that is kept encoded; bytes of a user that begin like it are kept encoded, too."""


def encode(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tags as the service takes them.

    Raises:
        UnsupportedValue: a value would not come back as it is.
    """
    if not isinstance(tags, Mapping):
        raise InvalidArgument(f"tag={tags!r}: expected a dict")
    return {name: _encode(name, value) for name, value in tags.items()}


def _encode(name: str, value: Any) -> Any:
    if type(value) in (bool, int, float, str) or (type(value) is bytes and not value.startswith(ENCODED)):
        return value
    try:
        return ENCODED + dumps(value)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"tag {name!r}: {error}") from None


def decode(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `encode` was given."""
    return {
        name: loads(value[len(ENCODED) :]) if type(value) is bytes and value.startswith(ENCODED) else value
        for name, value in tags.items()
    }
