"""Where code may live and what it may import; the rules are in docs/index.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tqclient", "tqserver", "benchmarks", "examples", "tests")
GENERATED = ROOT / "tqclient" / "wire" / "v1"
LINES_MAX = 500
# File → why it is longer. An entry that is no longer needed fails the test.
LONGER: dict[str, str] = {}

# What a daemon may use of the client: free of torch, and part of the contract between the two.
SHARED = (
    "tqclient.arrays",
    "tqclient.errors",
    "tqclient.limits",
    "tqclient.memory",
    "tqclient.schema",
    "tqclient.start",
    "tqclient.wire",
)
HEAVY = ("torch", "tensordict")
SLOW = (*HEAVY, "argparse", "asyncio", "google.protobuf", "grpc", "numpy", "rich")
# What a command is, or becomes: packages with a `__main__`.
COMMANDS = ("benchmarks", "tqclient.cli", "tqserver", "tqserver.controller", "tqserver.storage")
# The pure core has no I/O, no clock, no threads and no chance of its own: replaying its commands gives its state.
IMPURE = ("asyncio", "grpc", "os", "random", "secrets", "socket", "sqlite3", "subprocess", "threading", "time", "uuid")


def _sources(*paths: str) -> list[Path]:
    """The hand-written files at these paths: packages, modules without `.py`, or folders."""
    files = (file for path in paths for file in (ROOT / path).rglob("*.py"))
    modules = (file for path in paths if (file := ROOT / f"{path}.py").exists())
    return sorted(file for file in {*files, *modules} if GENERATED not in file.parents)


def _imports(file: Path) -> Iterator[str]:
    """Every absolute module name that a file imports, wherever in the file and by whatever statement."""
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def _within(module: str, *roots: str) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def _offences(path: str, *forbidden: str, but: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in _sources(path)
        for module in _imports(file)
        if _within(module, *forbidden) and not _within(module, *but)
    ]


def test_the_client_never_imports_the_server() -> None:
    assert not _offences("tqclient", "tqserver", "benchmarks", "examples", "tests")


def test_the_server_imports_only_the_shared_part_of_the_client() -> None:
    # `from tqclient import errors` names the package, too: the package itself is lazy and free of torch.
    assert not [line for line in _offences("tqserver", "tqclient", but=SHARED) if not line.endswith(" tqclient")]


@pytest.mark.parametrize("path", ["tqserver", *(module.replace(".", "/") for module in SHARED)])
def test_no_module_of_the_daemons_imports_torch(path: str) -> None:
    assert _sources(path)
    assert not _offences(path, *HEAVY)


def test_the_core_is_pure() -> None:
    assert _sources("tqserver/controller/core")
    assert not _offences("tqserver/controller/core", *IMPURE)
    shell = [
        line for line in _offences("tqserver/controller/core", "tqserver") if "tqserver.controller.core" not in line
    ]
    assert not shell


LOADS = [
    ("tqserver.controller.main", HEAVY),
    ("tqserver.storage.main", HEAVY),
    ("tqserver.controller.core", (*HEAVY, "grpc", "asyncio", "sqlite3")),
    ("tqclient", HEAVY),
    # The commands' entry points are there for Ctrl-C before all that is imported.
    *((f"{package}.__main__", SLOW) for package in COMMANDS),
]


@pytest.mark.parametrize(("module", "unwanted"), LOADS, ids=[module for module, _ in LOADS])
def test_a_module_loads_without(module: str, unwanted: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print(*sorted(set(sys.modules) & set({unwanted!r})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_files_are_short_enough_to_read() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in _sources(*PACKAGES)}
    assert {name: length for name, length in lengths.items() if length > LINES_MAX and name not in LONGER} == {}
    assert [name for name in LONGER if lengths.get(name, 0) <= LINES_MAX] == []


def test_no_nested_function_calls_itself() -> None:
    # It would be a cycle: what it sees, buffers included, would live until the garbage collector runs.
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    own_callers = [
        f"{file.relative_to(ROOT)}:{inner.lineno}: {inner.name}"
        for file in _sources("tqclient", "tqserver")
        for outer in ast.walk(ast.parse(file.read_text(), str(file)))
        if isinstance(outer, functions)
        for inner in ast.walk(outer)
        if isinstance(inner, functions)
        and inner is not outer
        and any(isinstance(node, ast.Name) and node.id == inner.name for body in inner.body for node in ast.walk(body))
    ]
    assert own_callers == []


def test_every_command_that_is_installed_exists() -> None:
    commands = metadata.distribution("tq-dataplane").entry_points.select(group="console_scripts")
    assert {command.name for command in commands} == {"tq", "tq-controller", "tq-storage", "tq-bench"}
    for command in commands:
        (file,) = _sources(command.module.replace(".", "/"))
        defined = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert command.attr in defined, command


def test_every_channel_is_dialed_in_one_place() -> None:
    # With gRPC's defaults, calls may never end: see DIALING.
    openers = ("insecure_channel", "secure_channel")
    elsewhere = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in _sources(*PACKAGES)
        if file != ROOT / "tqclient" / "wire" / "dialing.py"
        for node in ast.walk(ast.parse(file.read_text(), str(file)))
        if isinstance(node, ast.Attribute) and node.attr in openers
    ]
    assert elsewhere == []
