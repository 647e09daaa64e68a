"""Describing the service, and checking at the start that the required transport can be had."""

from __future__ import annotations

from tqclient.errors import TransportUnavailable, Unavailable
from tqclient.info import ClusterInfo, NodeInfo
from tqclient.operations.effects import Deadline, Operation
from tqclient.operations.nodes import open_path
from tqclient.operations.sessions import live_session, refresh_nodes
from tqclient.state import ClientState
from tqclient.wire.v1 import controller_pb2 as pb


def start(state: ClientState, required: bool, timeout: float | None = None) -> Operation[None]:
    """Opens the session of a new client, and the paths to the nodes that are there.

    Args:
        state: of the client.
        required: whether one transport was named: then each node must be reached by it.
        timeout: seconds.

    Raises:
        TransportUnavailable: the required transport cannot be had.
        Unavailable: the controller is away.
    """
    deadline = state.deadline(timeout)
    yield from live_session(state, deadline)
    yield from open_paths(state, deadline, required)


def open_paths(state: ClientState, deadline: Deadline, required: bool = False) -> Operation[None]:
    """Opens the paths to the attached nodes, so that a put knows which of them are on this host."""
    for node in state.preferred_nodes():
        yield from _try_path(state, node, deadline, required)


def _try_path(state: ClientState, node: pb.Node, deadline: Deadline, required: bool) -> Operation[None]:
    try:
        yield from open_path(state, node, deadline)
    except TransportUnavailable:
        if required:
            raise
    except Unavailable as error:
        state.paths.refused(node, error.message)  # it may come back: a put tries again


def describe(state: ClientState, timeout: float | None = None) -> Operation[ClusterInfo]:
    """Describes the service, with the path to each node and the reason for it."""
    deadline = state.deadline(timeout)
    reply = yield from refresh_nodes(state, deadline)
    nodes = []
    for node in reply.nodes:
        if node.attached:
            yield from _try_path(state, node, deadline, False)
        nodes.append(_node_info(state, node))
    return ClusterInfo.from_wire(state.address, reply, nodes)


def _node_info(state: ClientState, node: pb.Node) -> NodeInfo:
    transport = state.paths.get(node)
    return NodeInfo(
        node.name,
        node.address,
        node.attached,
        node.capacity_bytes,
        node.used_bytes,
        transport.name if transport else "",
        transport.reason if transport else state.paths.refusal(node) or "the node is not attached",
    )
