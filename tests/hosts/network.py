"""Hosts made of Linux namespaces: each has its own address, processes, /tmp, /dev/shm and network interface.

The hosts are joined by a bridge in a namespace without processes. The machine's own network is not touched.
Interfaces count bytes; links can be cut, restored and throttled; killing a host kills all of its processes.
Needs root, and `ip` and `tc` of Debian's iproute2.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import pytest

SUBNET = "10.231.7"
"""The hosts' addresses. Several networks may use them: each has its own bridge."""
LIFE_S = 7200
"""Seconds after which a host ends, whatever became of its test."""


def _run(command: str) -> str:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"`{command}` failed: {done.stderr.strip()}")
    return done.stdout


def _remove_spaces(prefix: str) -> None:
    for line in _run("ip netns list").splitlines():
        if line.startswith(prefix):
            with suppress(OSError):  # another process may be removing it
                _run(f"ip netns del {line.split()[0]}")


def _remove_lost_spaces() -> None:
    """Remove the namespaces of processes that were killed without notice."""
    owners = re.findall(r"^pr(\d+)-", _run("ip netns list"), re.MULTILINE)
    for owner in {owner for owner in owners if not Path(f"/proc/{owner}").exists()}:
        _remove_spaces(f"pr{owner}-")


def missing() -> str | None:
    """Return why this machine can't have network namespaces, or None if it can."""
    if not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter", "setpriv"))):
        return "needs ip and tc (Debian: apt-get install iproute2), unshare, nsenter and setpriv"
    name = f"pr-try-{os.getpid()}"
    try:
        _run(f"ip netns add {name}")
        _run(f"ip netns del {name}")
    except OSError as error:
        return f"can't create network namespaces: {error}"
    return None


def require() -> None:
    """Skip the caller's tests where namespaces can't be created; fail where CI requires them."""
    if reason := missing():
        if os.environ.get("PRACTICUM_REQUIRE_HOSTS"):
            pytest.fail(reason)
        pytest.skip(reason)


class Host:
    """One host. `run` and `start` execute commands on it; `kill` is a power cut."""

    def __init__(self, network: Network, name: str, number: int, shared: Sequence[Path]) -> None:
        self.network, self.name, self.number = network, name, number
        self.address = f"{SUBNET}.{number}"
        self.space, self.port, self._shared = f"{network.name}-{name}", f"v{number}", shared
        _run(f"ip netns add {self.space}")
        _run(f"ip link add eth0 netns {self.space} type veth peer name {self.port} netns {network.name}")
        _run(f"ip -n {self.space} addr add {self.address}/24 dev eth0")
        _run(f"ip -n {self.space} link set eth0 up")
        _run(f"ip -n {network.name} link set {self.port} master bridge up")
        self.boot()

    def boot(self) -> None:
        """Start the host's first process, which all others belong to. It ends with this process.

        Folders below /tmp that are shared stay visible; everything else below /tmp is the host's own.
        """
        places = [(shlex.quote(str(path)), f"/mnt/practicum-{i}") for i, path in enumerate(self._shared)]
        shell = " && ".join(
            [
                f"hostname {self.name}",
                *(f"mkdir -p {aside} && mount --bind {path} {aside}" for path, aside in places),
                "mount -t tmpfs tmp /tmp && mount -t tmpfs -o mode=1777 shm /dev/shm",
                *(f"mkdir -p {path} && mount --move {aside} {path}" for path, aside in places),
                f"ip link set lo up && echo ready && exec sleep {LIFE_S}",
            ]
        )
        spaces = "setpriv --pdeathsig KILL unshare --mount --uts --ipc --pid --fork --mount-proc --kill-child"
        command = f"ip netns exec {self.space} {spaces}"
        self.init = subprocess.Popen(
            [*command.split(), "sh", "-c", shell],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare of older Debians warns of its signal mask
            text=True,
            start_new_session=True,
        )
        assert self.init.stdout is not None
        if self.init.stdout.readline().strip() != "ready":
            raise OSError(f"host {self.name} does not start: `{shell}`")
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Start a command on this host and return its Popen."""
        enter = ["nsenter", "-t", str(self.pid), "--mount", "--uts", "--ipc", "--pid", "--net", "--wd=."]
        with_nsenter = [
            "setpriv",
            "--pdeathsig",
            "KILL",
        ]  # the command is its child, which a signal does not reach
        return subprocess.Popen([*enter, *with_nsenter, *command], env=env, text=True, **options)

    def run(
        self, command: Sequence[str], timeout: float, text: str | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, with this input; kill it after `timeout` seconds."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.start(command, **pipes, **options)
        try:
            output, _ = process.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"no end after {timeout:g} s\n{process.communicate()[0]}"
        return subprocess.CompletedProcess(list(command), process.returncode, output)

    def bytes(self) -> tuple[int, int]:
        """Return the bytes that this host has received and sent so far, as its interface counts them."""
        lines = _run(f"ip netns exec {self.space} cat /proc/net/dev").splitlines()
        counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0"))
        return int(counts[0]), int(counts[8])

    def cut(self) -> None:
        """Cut the host's link: packets are lost in both directions, and nobody gets an error."""
        _run(f"ip -n {self.network.name} link set {self.port} nomaster")

    def mend(self) -> None:
        _run(f"ip -n {self.network.name} link set {self.port} master bridge")

    def throttle(self, megabits: float | None) -> None:
        """Limit the link to so many Mbit/s in each direction, or no longer."""
        for space, device in ((self.space, "eth0"), (self.network.name, self.port)):
            burst = max(16, (megabits or 0) // 4)  # kB: 2 ms
            limit = f"tbf rate {megabits}mbit burst {burst:g}kb latency 400ms" if megabits else "noqueue"
            _run(f"tc -n {space} qdisc replace dev {device} root {limit}")

    def processes(self) -> dict[int, str]:
        """Return the command lines of this host's processes by their ids on the machine."""
        space, found = Path(f"/proc/{self.pid}/ns/pid").readlink(), {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if (entry / "ns/pid").readlink() == space:
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
                    )
        return found

    def kill(self) -> None:
        """Kill all processes of this host without notice."""
        os.kill(self.pid, signal.SIGKILL)
        self.init.wait(10)

    def end(self) -> None:
        if self.init.poll() is None:
            self.kill()


class Network:
    """Hosts that can reach each other, and nothing else. Use as a context manager."""

    def __init__(self, names: Sequence[str], shared: Sequence[Path] = ()) -> None:
        """Start hosts. `shared` folders are one file system that all of them see."""
        self.name = f"pr{os.getpid()}-{time.monotonic_ns() % 10**6:06}"
        self.shared, self.hosts = shared, dict[str, Host]()
        _remove_lost_spaces()
        try:
            _run(f"ip netns add {self.name}")
            _run(f"ip -n {self.name} link add bridge type bridge forward_delay 0")
            _run(f"ip -n {self.name} link set bridge up")
            for number, name in enumerate(names, 1):
                self.hosts[name] = Host(self, name, number, shared)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all hosts and remove their namespaces."""
        with ExitStack() as undo:
            undo.callback(_remove_spaces, self.name)
            for host in self.hosts.values():
                undo.callback(host.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]
