"""What every test has: hypothesis profiles, a seed, and a cluster on this machine."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.harness.scheduling import ByFile

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tqserver.local import LocalCluster

pytest_plugins = ["tests.harness.plugin"]

ReportT = TypeVar("ReportT", pytest.TestReport, pytest.CollectReport)

CI = os.environ.get("CI", "").lower() in ("1", "true")

# No deadline, and no verdict on slow generation: machines are shared; tests that are about time measure it themselves.
_COMMON = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _COMMON, max_examples=100, derandomize=True, database=None)
settings.register_profile("dev", _COMMON, max_examples=50)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if CI else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tq")
    group.addoption("--seed", type=int, help="of the random choices that tests make themselves; drawn when not given")
    group.addoption("--rounds", type=int, help="of the long fault runs")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = 0 if CI else secrets.randbits(32)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts what it runs in the background; every program that a test starts would be deaf to Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """For every `--dist`: `loadgroup` of xdist 3.8 finds no groups in pytest 9.2, and spreads test by test."""
    return ByFile(config, log)


def pytest_report_header(config: pytest.Config) -> str:
    profile = settings.get_current_profile_name()
    return f"seed: {config.option.seed} (repeat with --seed); hypothesis profile: {profile}"


@pytest.fixture(scope="session", autouse=True)
def _torch_warns_each_time() -> None:
    """Not once in a process, where whether a test fails would hang on which ran first."""
    torch.set_warn_always(True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _failed_where_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _failed_where_skipped((yield))


def _failed_where_skipped(report: ReportT) -> ReportT:
    """A test that CI does not run proves nothing: skips and expected failures count as failures there."""
    if CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"not run in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run: every random choice of a test derives from it."""
    return int(request.config.option.seed)


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int | None:
    """How many rounds of a long fault run were asked for; None leaves it to the test."""
    rounds: int | None = request.config.option.rounds
    return rounds


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """A controller and a storage node of 64 MiB, as child processes that end with the test."""
    from tqserver.local import LocalCluster

    with LocalCluster(storage_nodes=1, arena="64MiB") as running:
        yield running
