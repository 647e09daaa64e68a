"""What `deploy/` ships fits the daemons."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tqserver import config
from tqserver.controller.main import ControllerConfig
from tqserver.storage.main import StorageConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIGS = {"tq-controller": ControllerConfig, "tq-storage": StorageConfig}


@pytest.mark.parametrize("program", CONFIGS)
def test_a_unit_starts_its_daemon_with_options_that_exist(program: str, tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / f"{program}.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    (example,) = re.findall(
        rf"/etc/tq/{program.removeprefix('tq-')}\.toml <<'TOML'\n(.*?)TOML\n",
        (DEPLOY / "README.md").read_text(),
        re.DOTALL,
    )
    file = tmp_path / "daemon.toml"
    file.write_text(example)
    command, *arguments = shlex.split(start.replace("%S", "/var/lib").replace("%H", "host-1"))
    assert Path(command).name == program
    flags = [str(file) if argument.endswith(".toml") else argument for argument in arguments]
    loaded = config.load(CONFIGS[program], flags, program=program, environ={})
    assert loaded.token_file == Path("/etc/tq/tokens")


def test_every_constraint_is_exact_and_given_once() -> None:
    lines = [
        line for line in (DEPLOY / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")
    ]
    names = [re.fullmatch(r"([\w.-]+)==[\w.]+", line)[1].lower() for line in lines]  # type: ignore[index]
    assert len(names) == len(set(names))
