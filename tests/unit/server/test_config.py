from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tqserver.config import (
    ADDRESS,
    COUNT,
    FLAG,
    PATH,
    SECONDS,
    SIZE,
    ConfigError,
    choice,
    format_size,
    load,
    option,
    parse_seconds,
    parse_size,
    resolve,
)


@dataclass(frozen=True)
class Config:
    """Serves examples."""

    listen: str = option("127.0.0.1:1", "address to serve on", kind=ADDRESS)
    controller: str = option("127.0.0.1:2", "address of the controller", kind=ADDRESS, env="TQ_CONTROLLER")
    arena_bytes: int = option(1 << 30, "size", kind=SIZE)
    lease: float = option(10.0, "lease", kind=SECONDS)
    workers: int = option(4, "threads", kind=COUNT)
    prefault: bool = option(True, "touch 100% of the pages", kind=FLAG)
    level: str = option("info", "level", kind=choice("debug", "info"))
    token_file: Path | None = option(None, "tokens", kind=PATH)

    def __post_init__(self) -> None:
        if self.workers == 0:
            raise ValueError("workers 0: take one at least")


def of(*argv: str, **environ: str) -> Config:
    return load(Config, argv, program="tq-storage", environ=environ)


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "storage.toml"
    file.write_text('arena_bytes = "3GiB"\nlease = 0.5\nprefault = false\nworkers = 7\n')
    config = of(
        "--config",
        str(file),
        "--workers=9",
        TQ_STORAGE_WORKERS="8",
        TQ_STORAGE_LEASE="250ms",
        TQ_UNRELATED="x",
    )
    assert (config.workers, config.lease, config.arena_bytes, config.prefault) == (9, 0.25, 3 << 30, False)
    assert config.listen == "127.0.0.1:1"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "storage.toml"
    file.write_text("workers = 7\n")
    assert of(TQ_STORAGE_CONFIG=str(file)).workers == 7


def test_well_known_variable_is_read_when_the_own_one_is_not_set() -> None:
    assert of(TQ_CONTROLLER="a:1").controller == "a:1"
    assert of(TQ_CONTROLLER="a:1", TQ_STORAGE_CONTROLLER="b:2").controller == "b:2"
    assert of(TQ_CONTROLLER="").controller == "127.0.0.1:2"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [(["--prefault"], True), (["--prefault=false"], False), (["--no-prefault"], False), (["--prefault", "off"], False)],
)
def test_flags(argv: list[str], expected: bool) -> None:
    assert of(*argv).prefault is expected


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--arena-byts=1"], {}, "unknown argument '--arena-byts=1'; did you mean --arena-bytes?"),
        ([], {"TQ_STORAGE_ARENA_BYTE": "1"}, "variable TQ_STORAGE_ARENA_BYTE; did you mean TQ_STORAGE_ARENA_BYTES?"),
        (["--arena-bytes=lots"], {}, "arena_bytes (from flag --arena-bytes): 'lots' is no size"),
        ([], {"TQ_STORAGE_LEASE": "soon"}, "lease (from environment TQ_STORAGE_LEASE): 'soon' is no duration"),
        (["--lease=25h"], {}, "lease (from flag --lease): '25h' is longer than 24h"),
        (["--lease=" + "9" * 400], {}, "9' is longer than 24h"),
        (["--token-file="], {}, "token_file (from flag --token-file): '' is no path"),
        (["--arena-bytes=" + "9" * 400 + ".0KiB"], {}, "9.0KiB' is no whole number of bytes"),
        ([], {"TQ_CONTROLLER": "\udcff:1"}, "(from environment TQ_CONTROLLER): '\\udcff:1' is no HOST:PORT"),
        (["--level=loud"], {}, "'loud' is none of debug, info"),
        (["--prefault=maybe"], {}, "'maybe' is neither true nor false"),
        (["--workers=-1"], {}, "'-1' is no whole number"),
        (["--workers=0"], {}, "workers 0: take one at least"),
        (["--config=/nonexistent.toml"], {}, "/nonexistent.toml"),
    ],
)
def test_errors_name_the_option_and_exit_2(
    argv: list[str], environ: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        of(*argv, **environ)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arena_byte = 1", "unknown key 'arena_byte'; did you mean 'arena_bytes'?"),
        ("listen = 7700", "listen .* 7700 is no HOST:PORT"),
        ("workers = [1]", r"workers .* \[1\] is no N"),
        ("workers = ", "config file"),
    ],
)
def test_file_errors(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve(Config, {}, program="tq-storage", environ={}, config_file=file)


def test_variables_that_kubernetes_makes_for_a_service_are_passed_over() -> None:
    environ = {
        "TQ_STORAGE_SERVICE_HOST": "10.0.0.1",
        "TQ_STORAGE_SERVICE_PORT_GRPC": "7701",
        "TQ_STORAGE_PORT": "tcp://10.0.0.1:7701",
        "TQ_STORAGE_PORT_7701_TCP_ADDR": "10.0.0.1",
        "TQ_STORAGE_0_SERVICE_HOST": "10.0.0.1",
        "TQ_STORAGE_0_SERVICE_PORT": "7701",
        "TQ_STORAGE_0_PORT": "tcp://10.0.0.1:7701",
        "TQ_STORAGE_0_PORT_7701_TCP": "tcp://10.0.0.1:7701",
        "TQ_STORAGE_NODE_A_SERVICE_PORT_GRPC": "7701",
    }
    assert of(**environ) == Config()


@pytest.mark.parametrize("name", ["POLLER_TIMEOUT", "HANDSHAKE_TIMEOUT", "HANDSHAKE_RETRY_INTERVAL"])
def test_variables_of_transfer_queue_are_passed_over(name: str) -> None:
    assert of(**{f"TQ_STORAGE_{name}": "30"}) == Config()


def test_a_port_that_is_no_link_of_a_service_is_a_mistyped_option() -> None:
    with pytest.raises(ConfigError, match="unknown environment variable TQ_STORAGE_LISTEN_PORT"):
        resolve(Config, {}, program="tq-storage", environ={"TQ_STORAGE_LISTEN_PORT": "7701"})


def test_print_config_is_toml_with_origins_and_can_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        of("--print-config", "--arena-bytes=1.5GiB", "--level=debug", TQ_STORAGE_LEASE="2m")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert 'arena_bytes = "1536MiB"  # flag --arena-bytes\n' in printed
    assert "lease = 120  # environment TQ_STORAGE_LEASE\n" in printed
    assert "prefault = true  # default\n" in printed
    assert "# token_file =  # default\n" in printed
    file = tmp_path / "again.toml"
    file.write_text(printed)
    assert of("--config", str(file)) == Config(arena_bytes=1536 << 20, lease=120.0, level="debug")


def test_help_tells_every_option_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        of("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    for part in (
        "Serves examples.",
        'size [TQ_STORAGE_ARENA_BYTES; default "1GiB"]',
        'address of the controller [TQ_STORAGE_CONTROLLER or TQ_CONTROLLER; default "127.0.0.1:2"]',
        "touch 100% of the pages",
        "--token-file PATH tokens [TQ_STORAGE_TOKEN_FILE; default unset]",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("1.5GiB", 3 << 29),
        ("10GB", 10**10),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1XiB", "1e9", "0.3B", "1 2", "64MiB/s"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1000, "1000"), (1024, "1KiB"), (3 << 29, "1536MiB"), (1 << 40, "1TiB")]
)
def test_sizes_are_shown_in_the_unit_that_divides_them(size: int, text: str) -> None:
    assert format_size(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("10", 10.0), ("0.5", 0.5), ("250ms", 0.25), ("2m", 120.0), ("1h", 3600.0), ("24h", 86400.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds
