"""Configuration of a daemon: one frozen dataclass, filled from flags, the environment, a TOML file and defaults.

The first source that names an option wins: `--arena-bytes 64GiB`, then `TQ_STORAGE_ARENA_BYTES`, then
`arena_bytes = "64GiB"` in the file given by `--config` (or `TQ_STORAGE_CONFIG`), then the default.
A key that no option has is an error; a variable that is set to nothing counts as not set.

    @dataclass(frozen=True)
    class StorageConfig:
        listen: str = option("127.0.0.1:7701", "host:port to serve on")
        arena_bytes: int = option(4 << 30, "size of the arena", kind=SIZE)

    config = load(StorageConfig, sys.argv[1:], program="tq-storage")
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tqclient.wire.addresses import join_address, split_address

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    ConfigT = TypeVar("ConfigT", bound=DataclassInstance)
else:
    ConfigT = TypeVar("ConfigT")

T = TypeVar("T")

_UNITS: Final = {"": 1, "b": 1}
_UNITS.update({f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)})
_UNITS.update({f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)})
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)")
_SPAN_UNITS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
# Kubernetes gives every pod these for each Service that is named like the daemon, or like it and something
# (tq-storage-0, tq-controller-metrics); they are no options of ours.
_SERVICE_LINK: Final = re.compile(r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)|PORT")
_SERVICE_URL: Final = re.compile(r"(tcp|udp|sctp)://.+")  # of NAME_PORT, which may be a mistyped option as well
# TransferQueue's own, for which `tqclient.compat.transfer_queue` stands in: whoever comes from there may have them set.
_TRANSFER_QUEUE: Final = frozenset(
    {
        "TQ_CONTROLLER_CONNECTION_CHECK_INTERVAL",
        "TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL",
        "TQ_CONTROLLER_GET_METADATA_TIMEOUT",
        "TQ_STORAGE_HANDSHAKE_MAX_RETRIES",
        "TQ_STORAGE_HANDSHAKE_RETRY_INTERVAL",
        "TQ_STORAGE_HANDSHAKE_TIMEOUT",
        "TQ_STORAGE_POLLER_TIMEOUT",
    }
)


SECONDS_MAX: Final = 24 * 3600
"""That an option may ask for."""


class ConfigError(ValueError):
    """A key that no option has, a value that does not parse, or a file that cannot be read."""


@dataclass(frozen=True)
class Kind(Generic[T]):
    """How an option's value is read from text and shown as TOML.

    Attributes:
        metavar: what `--help` calls the value, with its unit.
        parse: text → value; ValueError says what is wrong.
        show: value → TOML.
    """

    metavar: str
    parse: Callable[[str], T]
    show: Callable[[T], str]


def parse_size(text: str) -> int:
    """Parses `4096`, `64KiB`, `1.5GiB`, `10GB` into bytes."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size; write 4096, 64MiB or 1.5GiB")
    size = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if not math.isfinite(size) or size != int(size):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Shows bytes in the largest binary unit that divides them."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()]
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def parse_seconds(text: str) -> float:
    """Parses `10`, `0.5`, `250ms`, `2m`, `1h` into seconds."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no duration; write 10, 0.5, 250ms or 2m (a bare number is seconds)")
    seconds = float(match[1]) * _SPAN_UNITS[match[2]]
    if seconds > SECONDS_MAX:  # on the wire, spans are milliseconds in 32 bits
        raise ValueError(f"{text!r} is longer than {SECONDS_MAX // 3600}h")
    return seconds


def _parse_flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError(f"{text!r} is neither true nor false")
    return word in ("true", "1", "yes", "on")


def _parse_count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _parse_address(text: str) -> str:
    split_address(text)
    return text


def _parse_listen(text: str) -> str:
    split_address(text, port_min=0)
    return text


def _parse_host(text: str) -> str:
    try:
        split_address(join_address(text, 1))
    except ValueError:
        raise ValueError(f"{text!r} is no name or address of a host; write node-b, 10.0.0.7 or fd00::7") from None
    return text


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("'' is no path")
    return Path(text)


def _quote(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)  # every JSON string is a TOML basic string


def _show_seconds(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)


TEXT: Final = Kind[str]("TEXT", str, _quote)
ADDRESS: Final = Kind[str]("HOST:PORT", _parse_address, _quote)
HOST: Final = Kind[str]("HOST", _parse_host, _quote)
LISTEN: Final = Kind[str]("HOST:PORT", _parse_listen, _quote)
PATH: Final = Kind[Path]("PATH", _parse_path, _quote)
SIZE: Final = Kind[int]("SIZE", parse_size, lambda value: _quote(format_size(value)))
SECONDS: Final = Kind[float]("SECONDS", parse_seconds, _show_seconds)
COUNT: Final = Kind[int]("N", _parse_count, str)
FLAG: Final = Kind[bool]("true|false", _parse_flag, lambda value: str(value).lower())


def choice(*values: str) -> Kind[str]:
    """Returns the kind of an option that takes one of a few words."""

    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"{text!r} is none of {', '.join(values)}")
        return text

    return Kind("|".join(values), parse, _quote)


def _parse_ports(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 1024 <= int(low) <= int(high) <= 65_535):
        raise ValueError(f"{text!r} is no range of ports; write 15000-17000, both from 1024 to 65535")
    return int(low), int(high)


PORTS: Final = Kind[tuple[int, int]]("LOW-HIGH", _parse_ports, lambda value: _quote(f"{value[0]}-{value[1]}"))
LOG_LEVEL: Final = choice("debug", "info", "warning", "error")


def option(default: T | None, help: str, *, kind: Kind[Any] = TEXT, env: str | None = None) -> Any:  # noqa: A002
    """Declares one option of a daemon's config dataclass.

    Args:
        default: the value when no source names the option; None is "unset".
        help: a line for `--help`.
        kind: how its value is read and shown.
        env: a well-known variable (`TQ_CONTROLLER`), read when the daemon's own (`TQ_STORAGE_CONTROLLER`) is not set.
    """
    return dataclasses.field(default=default, metadata={"help": help, "kind": kind, "env": env})


@dataclass(frozen=True)
class Resolved(Generic[ConfigT]):
    """A config and, per option, where its value came from."""

    config: ConfigT
    origins: Mapping[str, str]

    def show(self) -> str:
        """Returns the config as TOML, one option a line, each with its origin."""
        lines = []
        for field in dataclasses.fields(self.config):
            value = getattr(self.config, field.name)
            setting = (
                f"{field.name} = {field.metadata['kind'].show(value)}" if value is not None else f"# {field.name} ="
            )
            lines.append(f"{setting}  # {self.origins[field.name]}\n")
        return "".join(lines)


def env_prefix(program: str) -> str:
    """Returns what a daemon's own variables begin with: `TQ_STORAGE_` for `tq-storage`."""
    return program.upper().replace("-", "_") + "_"


def _nearest(key: str, known: Sequence[str]) -> str:
    return difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]


def _parse(field: dataclasses.Field[Any], value: object, origin: str) -> Any:
    """Parses text, or a TOML scalar, as the option's kind."""
    kind: Kind[Any] = field.metadata["kind"]
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, int | float) and kind in (SIZE, SECONDS, COUNT):
        value = str(value)
    if not isinstance(value, str):
        raise ConfigError(f"{field.name} (from {origin}): {value!r} is no {kind.metavar}")
    try:
        return kind.parse(value)
    except ValueError as error:
        raise ConfigError(f"{field.name} (from {origin}): {error}") from None


def _from_file(path: Path, known: Sequence[str]) -> dict[str, object]:
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from None
    for key in settings:
        if key not in known:
            raise ConfigError(f"config file {path}: unknown key {key!r}; did you mean {_nearest(key, known)!r}?")
    return settings


def _is_foreign(variable: str, rest: str, text: str) -> bool:
    """Says whether a variable that begins as ours do is known to be somebody else's."""
    linked = _SERVICE_LINK.fullmatch(rest) or (rest.endswith("_PORT") and _SERVICE_URL.fullmatch(text))
    return bool(linked) or variable in _TRANSFER_QUEUE


def _from_environ(
    environ: Mapping[str, str], prefix: str, fields: Sequence[dataclasses.Field[Any]]
) -> dict[str, tuple[str, str]]:
    """Returns option → (variable, text)."""
    known = [prefix + field.name.upper() for field in fields] + [prefix + "CONFIG"]
    for variable, text in environ.items():
        ours = variable.startswith(prefix) and not _is_foreign(variable, variable.removeprefix(prefix), text)
        if ours and variable not in known:
            raise ConfigError(f"unknown environment variable {variable}; did you mean {_nearest(variable, known)}?")
    found = {}
    for field in fields:
        for variable in (prefix + field.name.upper(), field.metadata["env"]):
            if variable is not None and environ.get(variable):
                found[field.name] = (variable, environ[variable])
                break
    return found


def resolve(
    cls: type[ConfigT],
    flags: Mapping[str, str],
    *,
    program: str,
    environ: Mapping[str, str],
    config_file: Path | None = None,
) -> Resolved[ConfigT]:
    """Works out every option's value and origin.

    Args:
        cls: a dataclass whose fields were all made by `option`.
        flags: option name → text from the command line.
        program: `tq-storage`; gives the prefix of the environment variables.
        environ: the environment.
        config_file: a TOML file; None looks at the daemon's CONFIG variable.

    Raises:
        ConfigError: naming the option, its source, and the nearest key that exists.
    """
    fields = dataclasses.fields(cls)
    prefix = env_prefix(program)
    from_environ = _from_environ(environ, prefix, fields)
    if config_file is None and environ.get(prefix + "CONFIG"):
        config_file = Path(environ[prefix + "CONFIG"])
    from_file = _from_file(config_file, [field.name for field in fields]) if config_file is not None else {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field in fields:
        name = field.name
        if name in flags:
            origin, text = "flag --" + name.replace("_", "-"), cast(object, flags[name])
        elif name in from_environ:
            variable, text = from_environ[name]
            origin = f"environment {variable}"
        elif name in from_file:
            origin, text = f"file {config_file}", from_file[name]
        else:
            origins[name] = "default"
            continue
        origins[name] = origin
        values[name] = _parse(field, text, origin)
    try:
        return Resolved(cls(**values), origins)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _arguments(cls: type[DataclassInstance], program: str) -> argparse.ArgumentParser:
    prefix = env_prefix(program)
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(cls.__doc__ or "").strip(),
        epilog=f"A flag wins over its environment variable ({prefix}NAME), that over the config file,\n"
        "that over the default. "
        "SIZE: 4096, 64MiB, 1.5GiB. SECONDS: 10, 0.5, 250ms, 2m.",
    )
    parser.add_argument("--config", metavar="PATH", type=Path, help=f"TOML file of options (or {prefix}CONFIG)")
    parser.add_argument(
        "--print-config", action="store_true", help="print every option and where it came from, and exit"
    )
    for field in dataclasses.fields(cls):
        kind: Kind[Any] = field.metadata["kind"]
        variables = " or ".join(filter(None, (prefix + field.name.upper(), field.metadata["env"])))
        default = "unset" if field.default is None else kind.show(field.default)
        text = f"{field.metadata['help']} [{variables}; default {default}]".replace("%", "%%")
        flag = "--" + field.name.replace("_", "-")
        if kind is FLAG:
            parser.add_argument(
                flag, dest=field.name, nargs="?", const="true", default=None, metavar=kind.metavar, help=text
            )
            parser.add_argument(
                "--no-" + flag[2:],
                dest=field.name,
                action="store_const",
                const="false",
                default=None,
                help=argparse.SUPPRESS,
            )
        else:
            parser.add_argument(flag, dest=field.name, default=None, metavar=kind.metavar, help=text)
    return parser


def load(cls: type[ConfigT], argv: Sequence[str], *, program: str, environ: Mapping[str, str] | None = None) -> ConfigT:
    """Returns the config of a daemon that was started with these arguments.

    `--help` and `--print-config` print and exit with 0; an error prints one line and exits with 2.

    Args:
        cls: a frozen dataclass whose fields were all made by `option`; its docstring heads `--help`.
        argv: the arguments behind the program's name.
        program: `tq-controller` or `tq-storage`.
        environ: the environment; None is this process's.
    """
    parser = _arguments(cls, program)
    arguments, rest = parser.parse_known_args(argv)
    names = [field.name for field in dataclasses.fields(cls)]
    if rest:
        known = ["--config", "--print-config", *("--" + name.replace("_", "-") for name in names)]
        parser.error(f"unknown argument {rest[0]!r}; did you mean {_nearest(rest[0], known)}?")
    flags = {name: text for name in names if (text := getattr(arguments, name)) is not None}
    try:
        resolved = resolve(
            cls,
            flags,
            program=program,
            environ=os.environ if environ is None else environ,
            config_file=arguments.config,
        )
    except ConfigError as error:
        parser.error(str(error))
    if arguments.print_config:
        sys.stdout.write(resolved.show())
        raise SystemExit(0)
    return resolved.config
