"""What can be awaited, and entered with `async with` as well."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Protocol, TypeVar


class _Enterable(Protocol):
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


Opened = TypeVar("Opened", bound=_Enterable)


class Opening(Coroutine[Any, Any, Opened]):
    """What `connect` and `claim` return: a coroutine that can also be entered with `async with`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Opened]) -> None:
        self._coroutine = coroutine
        self._opened: Opened | None = None

    def __await__(self) -> Generator[Any, Any, Opened]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Resumes it; for the event loop."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an exception in it; for the event loop."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Ends it without a result."""
        self._coroutine.close()

    async def __aenter__(self) -> Opened:
        self._opened = opened = await self._coroutine
        return opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, traceback)
