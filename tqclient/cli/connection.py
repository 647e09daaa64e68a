"""How commands reach the service."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Final

import tqclient
from tqclient.errors import Unavailable
from tqclient.wire.addresses import split_address

if TYPE_CHECKING:
    from tqclient.client import Client

DEFAULT_CONTROLLER: Final = "127.0.0.1:7700"
START_ONE: Final = "start one (tq up, tq-controller), or name it with --controller or TQ_CONTROLLER"
"""What to do where no controller answers."""


def controller_address(arguments: argparse.Namespace) -> str:
    """Returns the controller that a command line means."""
    address: str = arguments.controller or os.environ.get("TQ_CONTROLLER") or DEFAULT_CONTROLLER
    return address


def address_of(text: str) -> str:
    """Returns an address of a command line, which is one to connect to."""
    return _checked(text, port_min=1)


def listen_of(text: str) -> str:
    """Returns an address of a command line, which is one to listen on."""
    return _checked(text, port_min=0)


def _checked(text: str, port_min: int) -> str:
    try:
        split_address(text, port_min=port_min)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def connect(arguments: argparse.Namespace, *, transport: str = "auto") -> Client:
    """Connects as the command line says; token and certificates come from the environment.

    Args:
        arguments: with `controller` and `timeout`.
        transport: as `tq.connect` takes it.
    """
    named = arguments.controller or (None if os.environ.get("TQ_CONTROLLER") else DEFAULT_CONTROLLER)
    return tqclient.connect(named, transport=transport, timeout=arguments.timeout)


def reach(arguments: argparse.Namespace) -> Client:
    """Connects, likewise; where nobody answers, the error ends with what to do."""
    try:
        return connect(arguments)
    except Unavailable as error:
        raise Unavailable(f"{error.message}; {START_ONE}") from None
