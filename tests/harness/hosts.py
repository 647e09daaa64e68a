"""Several hosts on one machine: each with a network, a /dev/shm and a name of its own, on one switch.

They are namespaces, which live as long as a process is in them; a holder is, until a pipe from this process closes.
So nothing is left behind, whatever becomes of the test, and two runs at once do not meet: the switch is in a namespace,
too. The file system, apart from /dev/shm, and process ids are the machine's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from tests.harness.remote import Remote
from tests.harness.supervisor import Child, Supervisor, wait_until
from tqclient.limits import MIB

Direction = Literal["both", "out", "in"]
"""Of what is lost: all that a host sends and receives, what it sends, or what it receives."""

SUBNET: Final = "10.77.0"
SETUP_SECONDS: Final = 10.0
GRACE_SECONDS: Final = 1.0
"""A process whose parent was killed may take so long to end as well."""
_NOBODY: Final = "02:00:00:00:00:01"  # no interface has it: what is sent there is lost, and nobody is told
_SWITCH: Final = "ip link add sw type bridge forward_delay 0 && ip link set sw up"
_HOST: Final = "mount -t tmpfs -o size={shm_bytes} tmpfs /dev/shm && hostname {name} && ip link set lo up"
_HOLD: Final = " && echo held && exec cat"


class _Holder:
    """A process that does nothing but keep namespaces."""

    def __init__(self, unshare: Sequence[str], setup: str) -> None:
        self._process = subprocess.Popen(
            [*unshare, "sh", "-c", setup + _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() != b"held\n":
            why = self._process.stderr.read().decode(errors="replace").strip()
            self.close()
            raise RuntimeError(
                f"hosts are network, mount and UTS namespaces, and this machine refuses them: {why}. Run the tests as "
                "root with CAP_SYS_ADMIN and CAP_NET_ADMIN, or allow user namespaces"
            )
        self.pid = self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SETUP_SECONDS)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


class Host:
    """One host.

    Attributes:
        name: its hostname.
        address: its IPv4 address.
        shm: its /dev/shm, as this process sees it.
    """

    def __init__(self, network: Network, number: int, name: str, holder: _Holder) -> None:
        self.name = name
        self.address = f"{SUBNET}.{number}"
        self.shm = Path(f"/proc/{holder.pid}/root/dev/shm")
        self._network = network
        self._number = number
        self.holder = holder

    @property
    def port(self) -> str:
        """Name of the switch's end of its cable."""
        return f"port{self._number}"

    def run(
        self,
        command: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Starts a program on this host; its pid is its own.

        Args:
            command: the program and its arguments.
            name: for its output files and failures.
            env: on top of this process' environment.
            pass_fds: descriptors that it inherits.
        """
        return self._network.supervisor.command(
            [*self.enter("--mount", "--uts", "--ipc"), *command],
            name=f"{self.name}-{name}",
            env=env,
            pass_fds=pass_fds,
        )

    def remote(
        self,
        factory: Callable[..., Any],
        *arguments: Any,
        name: str,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Remote:
        """Makes an object in a process on this host; it ends with the network.

        Args:
            factory: of the object; at the top of a module.
            arguments: of the factory.
            name: of the process.
            env: on top of this process' environment.
            options: of the factory.
        """

        def start(command: list[str], descriptor: int) -> Child:
            return self.run(command, name=name, env=env, pass_fds=[descriptor])

        return self._network.keep(Remote(start, factory, *arguments, **options))

    def enter(self, *namespaces: str) -> list[str]:
        """Returns the command prefix that runs a program in this host's network and further namespaces."""
        return [*self._network.nsenter(self.holder.pid), "--net", *namespaces, "--"]

    def ip(self, *commands: str) -> None:
        """Changes its own network."""
        _ip(self.enter(), commands)


class Network:
    """Hosts on one switch.

    Args:
        names: of the hosts; also their hostnames.
        directory: for what their processes print.
        shm_bytes: size of each /dev/shm.
        user_namespace: whether to be root in a user namespace only; None: where this process is not root itself.
    """

    def __init__(
        self, names: Sequence[str], directory: Path, *, shm_bytes: int = 256 * MIB, user_namespace: bool | None = None
    ) -> None:
        self._names = list(names)
        self._shm_bytes = shm_bytes
        self._in_user = os.geteuid() != 0 if user_namespace is None else user_namespace
        self._stack = ExitStack()
        self.supervisor = Supervisor(directory)
        self.hosts: dict[str, Host] = {}

    def __getitem__(self, name: str) -> Host:
        """The host of that name."""
        return self.hosts[name]

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            user = ["--user", "--map-root-user"] if self._in_user else []
            self._switch = self._held(stack, ["unshare", *user, "--net"], _SWITCH)
            for number, name in enumerate(self._names, start=1):
                unshare = [*self.nsenter(self._switch.pid), "--", "unshare", "--net", "--mount", "--uts", "--ipc"]
                setup = _HOST.format(shm_bytes=self._shm_bytes, name=name)
                host = Host(self, number, name, self._held(stack, unshare, setup))
                self._plug_in(host)
                self.hosts[name] = host
            stack.callback(self._assert_deserted)
            stack.enter_context(self.supervisor)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def keep(self, remote: Remote) -> Remote:
        """Closes it when the network ends, before anything else."""
        self._stack.callback(remote.close)
        return remote

    def nsenter(self, pid: int) -> list[str]:
        """Returns the beginning of a command that enters namespaces of a process."""
        user = ["--user", "--preserve-credentials"] if self._in_user else []
        return ["nsenter", f"--target={pid}", *user]

    @contextmanager
    def partitioned(self, host: Host, direction: Direction = "both") -> Iterator[None]:
        """Nothing passes between the host and all others; nobody is told, as when a cable is cut."""
        self.cut(host, direction)
        try:
            yield
        finally:
            self.heal(host, direction)

    def cut(self, host: Host, direction: Direction = "both") -> None:
        """Begins what `partitioned` does."""
        if direction == "both":
            self._ip(f"link set {host.port} down")
            return
        for source, target in self._pairs(host, direction):
            source.ip(f"neigh replace {target.address} dev eth0 lladdr {_NOBODY} nud permanent")

    def heal(self, host: Host, direction: Direction = "both") -> None:
        """Ends what `cut` began."""
        if direction == "both":
            self._ip(f"link set {host.port} up")
            return
        for source, target in self._pairs(host, direction):
            source.ip(f"neigh del {target.address} dev eth0")

    @contextmanager
    def throttled(self, host: Host, rate: str) -> Iterator[None]:
        """What the host receives comes at this rate, in the words of tc: "50mbit"."""
        tc = [*self.nsenter(self._switch.pid), "--net", "--", "tc", "qdisc"]
        _run([*tc, "add", "dev", host.port, "root", *f"tbf rate {rate} burst 64kb latency 100ms".split()])
        try:
            yield
        finally:
            _run([*tc, "del", "dev", host.port, "root"])

    def _pairs(self, host: Host, direction: Direction) -> list[tuple[Host, Host]]:
        """(source, target) of each way that is cut."""
        others = [other for other in self.hosts.values() if other is not host]
        return [(host, other) if direction == "out" else (other, host) for other in others]

    @staticmethod
    def _held(stack: ExitStack, unshare: Sequence[str], setup: str) -> _Holder:
        holder = _Holder(unshare, setup)
        stack.callback(holder.close)
        return holder

    def _plug_in(self, host: Host) -> None:
        self._ip(
            f"link add {host.port} type veth peer name eth0 netns {host.holder.pid}",
            f"link set {host.port} master sw up",
        )
        host.ip(f"address add {host.address}/24 dev eth0", "link set eth0 up")

    def _ip(self, *commands: str) -> None:
        _ip([*self.nsenter(self._switch.pid), "--net", "--"], commands)

    def _assert_deserted(self) -> None:
        """Every process of the hosts has ended with those that started it; one that has not is ended, and a fault."""
        keepers = {self._switch.pid, *(host.holder.pid for host in self.hosts.values())}
        namespaces = {_network_namespace(pid) for pid in keepers} - {None}

        def strays() -> set[int]:
            pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - keepers
            return {pid for pid in pids if _network_namespace(pid) in namespaces}

        try:
            wait_until(lambda: not strays(), timeout=GRACE_SECONDS, what="every process of the hosts has ended")
        except AssertionError:
            left = {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in strays()}
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes left behind on the hosts: {left}") from None


def _ip(prefix: Sequence[str], commands: Sequence[str]) -> None:
    _run([*prefix, "ip", "-batch", "-"], "\n".join(commands))


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {text}\n{done.stderr}"


def _network_namespace(pid: int) -> str | None:
    """Identity of the namespace that a process is in; None when it has ended, or is none of ours to look at."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
