"""How a bridge is set up: in code, or by flags of a framework's own argparse parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from tqclient.arguments import int_of, name_of, names_of, seconds_of
from tqclient.errors import InvalidArgument
from tqclient.policy import NUMBER_MAX

_PREFIX: Final = "tq_"
_UNBOUNDED: Final = -1
"""Of a flag that is an int: no limit."""


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """What all processes of a job say alike, but for `device`.

    Attributes:
        controller: `host:port`; None takes TQ_CONTROLLER.
        run: name of the job: its rollouts are the partitions `<run>/<rollout id>`.
        tasks: that consume every rollout, such as `actor_train` and `critic_train`. A rollout is finished once all of
            them are done with it, and its bytes are free then.
        max_staleness: rollouts that generation may be ahead of training: at most one more is live at any time. None: no
            limit.
        start_rollout_id: the job's first rollout; of a job that goes on from a checkpoint, the one that comes next.
        extra_fields: fields that a rollout may have beside the known ones.
        device: where fetched tensors go: `cpu`, `cuda`, `cuda:1`, `npu`. One that is not there is an error.
        timeout: seconds that `publish` and `fetch` wait.
        transport: as `tqclient.connect` has it.
        max_attempts: deliveries of a sample before it is given up; high, as a trainer cannot go on without it.

    Raises:
        InvalidArgument: a value is out of bounds.
    """

    controller: str | None = None
    run: str = "rollout"
    tasks: Sequence[str] = ("actor_train",)
    max_staleness: int | None = 0
    start_rollout_id: int = 0
    extra_fields: Sequence[str] = ()
    device: str = "cpu"
    timeout: float = 3600.0
    transport: str = "auto"
    max_attempts: int = 1000

    def __post_init__(self) -> None:
        if "/" in name_of(self.run, what="run"):
            raise InvalidArgument(f"run={self.run!r}: expected a name without '/'")
        for name, least in (("tasks", 1), ("extra_fields", 0)):
            names = names_of(getattr(self, name), what=name)
            if len(names) < least or len(set(names)) < len(names):
                raise InvalidArgument(f"{name}={names!r}: expected {least} or more names that differ")
            object.__setattr__(self, name, tuple(names))
        int_of(self.start_rollout_id, what="start_rollout_id", least=0, most=NUMBER_MAX)
        if self.max_staleness is not None:
            int_of(self.max_staleness, what="max_staleness", least=0, most=NUMBER_MAX)
        int_of(self.max_attempts, what="max_attempts", least=1, most=NUMBER_MAX)
        seconds_of(self.timeout, what="timeout")
        if not isinstance(self.device, str) or not self.device:
            raise InvalidArgument(f"device={self.device!r}: name it: cpu, cuda, cuda:1, npu")

    @classmethod
    def from_args(cls, args: Any) -> RolloutOptions:
        """Reads what `add_arguments` added; what a namespace lacks, because the framework left it out, has its default.

        Raises:
            InvalidArgument: a value is out of bounds.
        """
        given: dict[str, Any] = {each.name: getattr(args, _PREFIX + each.name, each.default) for each in fields(cls)}
        if given["max_staleness"] == _UNBOUNDED:
            given["max_staleness"] = None
        return cls(**given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the bridge's flags, `--tq-...`, to a parser; `RolloutOptions.from_args` reads them."""
    default = RolloutOptions()
    group = parser.add_argument_group("tq", "data plane between rollout and training")
    group.add_argument("--tq-controller", metavar="HOST:PORT", help="of the controller (default: TQ_CONTROLLER)")
    group.add_argument("--tq-run", default=default.run, help="name of this job (default: %(default)s)")
    group.add_argument(
        "--tq-tasks", nargs="+", default=list(default.tasks), help="who consumes every rollout (default: %(default)s)"
    )
    group.add_argument(
        "--tq-max-staleness",
        type=int,
        default=default.max_staleness,
        help="rollouts that generation may be ahead of training; -1: any number (default: %(default)s)",
    )
    group.add_argument("--tq-start-rollout-id", type=int, default=default.start_rollout_id, help="of the first rollout")
    group.add_argument("--tq-extra-fields", nargs="*", default=[], help="fields beside the known ones")
    group.add_argument("--tq-device", default=default.device, help="cpu, cuda, cuda:1, npu (default: %(default)s)")
    group.add_argument(
        "--tq-timeout", type=float, default=default.timeout, help="seconds of a wait (default: %(default)s)"
    )
    group.add_argument("--tq-transport", default=default.transport, help="auto, or the one to require")
    group.add_argument("--tq-max-attempts", type=int, default=default.max_attempts, help="deliveries of a sample")
