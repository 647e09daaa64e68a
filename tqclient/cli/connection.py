"""How commands reach the service."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Final

import tqclient

if TYPE_CHECKING:
    from tqclient.client import Client

DEFAULT_CONTROLLER: Final = "127.0.0.1:7700"


def controller_address(arguments: argparse.Namespace) -> str:
    """Returns the controller that a command line means."""
    address: str = arguments.controller or os.environ.get("TQ_CONTROLLER") or DEFAULT_CONTROLLER
    return address


def connect(arguments: argparse.Namespace, *, transport: str = "auto") -> Client:
    """Connects as the command line says; token and certificates come from the environment.

    Args:
        arguments: with `controller` and `timeout`.
        transport: as `tq.connect` takes it.
    """
    return tqclient.connect(controller_address(arguments), transport=transport, timeout=arguments.timeout)
