"""A small network on one machine: hosts as network namespaces, joined by links of a given rate and delay.

As root, on Linux with iproute2::

    with ShapedNetwork(hosts=2, rate="1gbit", delay="100us") as network:
        print(network.description)
        network.start(0, ["python", "train.py"], {"NODE_RANK": "0", **os.environ}).wait()

Everything lives in the namespaces, so nothing is left of it when they are gone, and addresses clash with nobody's.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Optional

from shape import burst_bytes, parse_delay, parse_rate
from signals import signals_as_exceptions, signals_ignored

_SWITCH_SOURCE = Path(__file__).with_name("delay_switch.c")
_PATIENCE_SECONDS = 3.0  # that processes are given to end by themselves
_PROBE = f"lsbench-probe-{os.getpid()}"
_QUEUE_FRAMES = 1000  # of a device; the default of TAP devices is too short for a burst at 1 Gbit/s


class NetworkRefusedError(RuntimeError):
    """This machine cannot carry the network; the message says what to do about it."""


def refusal() -> Optional[str]:
    """Return why this machine cannot carry a network, with the cure; ``None`` where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run this with sudo, or as root in a container started with --privileged"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (Debian, Ubuntu: apt install iproute2)"
    try:
        _run("ip", "netns", "add", _PROBE)
        _run("ip", "netns", "delete", _PROBE)
    except NetworkRefusedError as error:
        return f"root may not make network namespaces here; if this is a container, start it with --privileged. {error}"
    return None


class ShapedNetwork:
    """Hosts whose device ``eth0`` sends at a given rate, joined by a switch that delays every frame by a given time.

    The rate is kept by ``tc tbf``, the delay by ``tc netem`` where the kernel has it, else by a small switch in user
    space (``delay_switch.c``), else there is none; :attr:`description` says which. Entering removes what an earlier run
    that was killed has left behind. Leaving, in whatever way (SIGTERM and SIGHUP become exceptions inside), ends the
    processes on the hosts and then removes the hosts.

    Args:
        hosts: number of hosts; host ``i`` has the address ``address(i)``.
        rate: of each host's egress, such as ``"100mbit"``.
        delay: one way between two hosts, such as ``"100us"``, or ``"0"``.
        name: prefix of the namespaces; networks of the same name exclude each other.

    Attributes:
        description: what was built, in words; set on entering.

    Raises:
        ValueError: for a rate or delay that cannot be read.
        NetworkRefusedError: on entering, if the machine cannot carry the network, or carries one of this name already.
    """

    def __init__(self, hosts: int, rate: str, delay: str, name: str = "lsbench") -> None:
        self.hosts = hosts
        self.name = name
        self.description = ""
        self._bits_per_second = parse_rate(rate)
        self._delay_us = parse_delay(delay)
        self._text = f"{hosts} hosts, {rate}"
        self._switch = f"{name}-switch"
        self._processes: list[subprocess.Popen[Any]] = []
        self._stack = ExitStack()

    def __enter__(self) -> "ShapedNetwork":
        """Build the network."""
        problem = refusal()
        if problem is not None:
            raise NetworkRefusedError(problem)
        with ExitStack() as stack:
            stack.enter_context(_claimed(self.name))
            stack.enter_context(signals_as_exceptions())
            stack.callback(self._remove)
            self._remove()
            self._build(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        """End the processes on the hosts and remove the network."""
        self._stack.close()

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"10.78.0.{host + 1}"

    def start(
        self, host: int, command: Sequence[str], environment: Optional[Mapping[str, str]] = None, **popen_arguments: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host.

        Args:
            host: from 0.
            command: program and arguments.
            environment: all its environment variables; ``None`` for those of this process.
            **popen_arguments: for :class:`subprocess.Popen`.

        Returns:
            the process; it ends with the network at the latest.
        """
        return self._start_in(self._host(host), command, env=environment, **popen_arguments)

    def _host(self, host: int) -> str:
        return f"{self.name}-host{host}"

    def _start_in(self, namespace: str, command: Sequence[str], **popen_arguments: Any) -> subprocess.Popen[Any]:
        # In a session of its own, Ctrl-C does not reach it: this process ends it when all is in order.
        command = ["ip", "netns", "exec", namespace, *command]
        self._processes.append(subprocess.Popen(command, start_new_session=True, **popen_arguments))
        return self._processes[-1]

    def _build(self, scratch: Path) -> None:
        _run("ip", "netns", "add", self._switch)
        for host in range(self.hosts):
            _run("ip", "netns", "add", self._host(host))
        self.description = f"{self._text}, {self._build_links(scratch)}"
        for host in range(self.hosts):
            inside = ["ip", "-n", self._host(host)]
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "txqueuelen", str(_QUEUE_FRAMES), "up")
            rate = ["rate", f"{self._bits_per_second}bit", "burst", str(burst_bytes(self._bits_per_second))]
            _run("tc", "-n", self._host(host), "qdisc", "add", "dev", "eth0", "root", "tbf", *rate, "latency", "50ms")

    def _build_links(self, scratch: Path) -> str:
        delay = f"{self._delay_us} us one way"
        if self._delay_us == 0:
            self._build_bridge(netem=False)
            return "no delay asked for"
        if self._has_netem():
            self._build_bridge(netem=True)
            return f"{delay} by netem"
        if self._start_delay_switch(scratch):
            self._move_switch_ports()
            return f"{delay} by a switch in user space (the kernel has no netem)"
        self._build_bridge(netem=False)
        return f"WITHOUT the {delay}: no netem in the kernel, and no C compiler with Linux headers or no /dev/net/tun"

    def _has_netem(self) -> bool:
        attempt = ["tc", "-n", self._switch, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(attempt, capture_output=True).returncode == 0

    def _build_bridge(self, netem: bool) -> None:
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in range(self.hosts):
            peer = ["peer", "name", "eth0", "netns", self._host(host)]
            _run("ip", "-n", self._switch, "link", "add", f"port{host}", "type", "veth", *peer)
            _run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "bridge", "up")
            if netem:
                # On the switch's side, beside the host's tbf: one as a child of the other would share a queue.
                delay = ["delay", f"{self._delay_us}us", "limit", "100000"]
                _run("tc", "-n", self._switch, "qdisc", "add", "dev", f"port{host}", "root", "netem", *delay)

    def _start_delay_switch(self, scratch: Path) -> bool:
        compiler = next((tool for tool in ("cc", "gcc", "clang") if shutil.which(tool)), None)
        if compiler is None or not Path("/dev/net/tun").exists():
            return False
        program = str(scratch / "delay_switch")
        if subprocess.run([compiler, "-O2", "-o", program, str(_SWITCH_SOURCE)], capture_output=True).returncode:
            return False
        command = [program, str(self.hosts), str(self._delay_us)]
        switch = self._start_in(self._switch, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert switch.stdout is not None
        with switch.stdout:
            return bool(switch.stdout.readline() == "ready\n")

    def _move_switch_ports(self) -> None:
        for host in range(self.hosts):
            inside = ["ip", "-n", self._host(host), "link", "set", "eth0"]
            _run("ip", "-n", self._switch, "link", "set", f"port{host}", "netns", self._host(host), "name", "eth0")
            _run(*inside, "address", f"02:4c:53:00:00:{host:02x}")

    def _remove(self) -> None:
        with signals_ignored():
            namespaces = [name for name in _namespaces() if name.startswith((f"{self.name}-host", self._switch))]
            for process in self._processes:
                process.terminate()  # also those that are still on their way into their namespace
            _end_processes(namespaces)
            for process in self._processes:
                process.wait()
            for namespace in namespaces:
                _run("ip", "netns", "delete", namespace)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise NetworkRefusedError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _end_processes(namespaces: Sequence[str]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while pids := [int(pid) for name in namespaces for pid in _run("ip", "netns", "pids", name).split()]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.05)


@contextmanager
def _claimed(name: str) -> Iterator[None]:
    # An abstract socket needs no file, and is given back by the kernel however the process ends.
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0{name}")
        except OSError as error:
            raise NetworkRefusedError(f"another process has a network called {name!r}: wait until it ends") from error
        yield
