"""How a bridge is set up: in code, or by flags of a framework's own argparse parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from tqclient.errors import InvalidArgument

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
        if not self.run or "/" in self.run:
            raise InvalidArgument(f"run={self.run!r}: expected a name without '/'")
        for name, least in (("tasks", 1), ("extra_fields", 0)):
            names = getattr(self, name)
            if isinstance(names, str) or len(names) < least:
                raise InvalidArgument(f"{name}={names!r}: expected a list of names")
            object.__setattr__(self, name, tuple(names))
        _check_count("start_rollout_id", self.start_rollout_id)
        if self.max_staleness is not None:
            _check_count("max_staleness", self.max_staleness)
        if not self.timeout >= 0:
            raise InvalidArgument(f"timeout={self.timeout!r}: expected seconds, 0 or more")
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


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"{name}={value!r}: expected an int, 0 or more")


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
