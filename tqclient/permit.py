"""Permits as blocking callers hold them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from tqclient.errors import InvalidArgument
from tqclient.operations import permits
from tqclient.operations.permits import PermitHandle

if TYPE_CHECKING:
    from tqclient.client import Client


class PermitData:
    """Samples that a partition admitted and that are being generated."""

    def __init__(self, handle: PermitHandle) -> None:
        """Made by `Partition.permit`."""
        self._handle = handle

    @property
    def version(self) -> int | None:
        """The weight version to generate with: the partition's when the permit was granted; None: none was set yet."""
        return self._handle.version

    @property
    def samples(self) -> int:
        """How many samples it was granted for."""
        return self._handle.samples

    def __repr__(self) -> str:
        state = ", returned" if self._handle.returned else ""
        return f"<Permit for {self.samples} samples of {self._handle.partition.name!r}, version {self.version}{state}>"


def handle_of(permit: object) -> PermitHandle | None:
    """Returns the handle of what `put` was given as a permit; None of none."""
    if permit is None or isinstance(permit, PermitData):
        return None if permit is None else permit._handle
    raise InvalidArgument(f"permit={permit!r:.80}: expected what Partition.permit returns")


class Permit(PermitData):
    """A permit; as a context manager, it returns what is left of it when it is left."""

    def __init__(self, client: Client, handle: PermitHandle) -> None:
        super().__init__(handle)
        self._client = client

    def close(self) -> None:
        """Returns what is left. Repeatable; without effect after a fork."""
        if not self._client._state.forked:
            self._client._run(permits.give_back(self._client._state, self._handle))

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
