"""Child processes of a test: started, killed, stopped and continued by pid, and gone when the test is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

POLL_SECONDS: Final = 0.01
PATIENCE_SECONDS: Final = 60.0
"""What comes at once otherwise may take so long on a busy machine; only who waits in vain waits for all of it."""
ROOT: Final = Path(__file__).resolve().parents[2]

T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, what: str, timeout: float = PATIENCE_SECONDS) -> T:
    """Polls until the condition is true.

    Args:
        condition: cheap; its first true result is returned.
        what: is waited for, for the failure.
        timeout: seconds; less than PATIENCE_SECONDS where it is promised.

    Raises:
        AssertionError: it did not come true in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(POLL_SECONDS)


class Child:
    """One process, and the group that it leads. One that waits for the test's end reads its standard input.

    Attributes:
        name: of its output files and in failures.
        pid: of the process; also of its group.
    """

    def __init__(
        self, name: str, command: list[str], directory: Path, env: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self._out = directory / f"{name}.out"
        self._err = directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # never written to: it ends with this process, however that ends
                stdout=out,
                stderr=err,
                env=dict(env),
                start_new_session=True,
                cwd=ROOT,
                pass_fds=pass_fds,
            )
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        """What it printed so far."""
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it complained of so far."""
        return self._err.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether it has not ended (it may be stopped)."""
        return self._process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether it is held by SIGSTOP, with all of its threads."""
        return self.running and is_stopped(self.pid)

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """SIGSTOP, and waits until the process has stopped."""
        if self.running:
            stop_processes(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM; does not wait."""
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, unless it has ended."""
        if self.running:
            os.kill(self.pid, number)

    def wait(self, *, timeout: float = PATIENCE_SECONDS) -> int:
        """Waits for the end; returns the exit status, negative for a signal."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout} s\n{self.report()}") from None

    def wait_for(self, text: str, *, timeout: float = PATIENCE_SECONDS) -> str:
        """Waits until a line on stdout holds the text, and returns that line.

        Raises:
            AssertionError: it did not come, or the process ended without it.
        """

        def find() -> str | None:
            ended = not self.running  # asked first: what it printed before its end is then all there
            for line in self.stdout.splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line.rstrip("\n")
            if ended:
                raise AssertionError(f"{self.name} ended without printing {text!r}\n{self.report()}")
            return None

        line = wait_until(find, timeout=timeout, what=f"{self.name} prints {text!r}")
        assert line is not None
        return line

    def report(self) -> str:
        """Its output, for a failure."""
        return f"--- {self.name} (pid {self.pid}) stdout:\n{self.stdout}--- stderr:\n{self.stderr}"

    def end(self) -> None:
        """Ends the process with everything that it started in its group; repeatable."""
        with suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(10)
        assert self._process.stdin is not None
        self._process.stdin.close()


class Supervisor:
    """Starts processes, and ends them all when its block ends, however it ends.

    Args:
        directory: for their output.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.children: list[Child] = []

    def python(self, source: str | Path, *args: Any, name: str = "", env: Mapping[str, str] | None = None) -> Child:
        """Starts a Python script.

        Args:
            source: a file, or the text of the program.
            args: its arguments, made into strings.
            name: for files and failures; made up when empty.
            env: on top of this process' environment.
        """
        script = ["-c", source] if isinstance(source, str) else [str(source)]
        return self.command([sys.executable, "-u", *script, *map(str, args)], name=name, env=env)

    def command(
        self,
        command: list[str],
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Starts any program, likewise; it inherits the descriptors `pass_fds`."""
        environment = {**child_environ(), **(env or {})}
        child = Child(name or f"child-{len(self.children)}", command, self._directory, environment, pass_fds)
        self.children.append(child)
        return child

    def close(self) -> None:
        """Ends every process; repeatable."""
        for child in self.children:
            child.end()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def child_environ() -> dict[str, str]:
    """Returns this process' environment for a child, which finds this project's packages and tests."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs: it is stopped, or gone.

    SIGSTOP holds a process once one of its threads has taken it, and until then each of the others goes on: the first
    thread to stop tells nothing of the rest.
    """
    try:
        states = [_state(task) for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return True
    return all(state in ("T", "Z", "X", "") for state in states)


def stop_processes(*pids: int) -> None:
    """SIGSTOP to processes, and waits until none of their threads runs."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(map(is_stopped, pids)), what=f"processes {pids} stop")


def _state(task: Path) -> str:
    """The letter of a thread's state, as /proc gives it; empty when it is gone."""
    try:
        status = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return status.rpartition(")")[2].split()[0]
