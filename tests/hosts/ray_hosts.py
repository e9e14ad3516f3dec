"""A Ray cluster over the hosts of `network.py`: a head, where the controller runs, and nodes that join it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster import ENV
from tests.hosts.network import Host, Network

START_S = 240.0
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""The tests of one host set this variable to keep Ray on 127.0.0.1."""
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ROOT = Path(__file__).parents[2]
HOST_ENV = {
    **{name: value for name, value in (os.environ | ENV).items() if name != LOOPBACK},
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "OMP_NUM_THREADS": "1",
    "RAY_raylet_start_wait_time_s": "120",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *os.environ.get("PYTHONPATH", "").split()]),
}


class RayHosts(Network):
    """Hosts with Ray nodes. The first one is the head; `cpus` has each host's logical CPUs. `others` are
    hosts without Ray."""

    def __init__(
        self,
        cpus: Mapping[str, int],
        shared: Sequence[Path] = (),
        others: Sequence[str] = (),
        *,
        jobs: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """With `jobs`, the head takes jobs at port 8265. `env` has more variables for `ray start`."""
        super().__init__([*cpus, *others], shared)
        try:
            self.cpus, self.jobs, self.env = dict(cpus), jobs, HOST_ENV | dict(env or {})
            self.head = self[next(iter(cpus))]
            self.address = f"{self.head.address}:6379"
            self.start_ray(self.head)
            self.start_rays([self[name] for name in list(cpus)[1:]])
        except BaseException:
            self.close()
            raise

    def start_rays(self, hosts: Sequence[Host]) -> None:
        """Start Ray on hosts that join the head, all at the same time."""
        pool = ThreadPoolExecutor(len(hosts))
        try:
            list(pool.map(self.start_ray, hosts))
        finally:
            pool.shutdown(wait=False)  # after a signal, the commands end with their hosts

    def start_ray(self, host: Host, **env: str) -> None:
        """Start Ray's processes on a host, with more environment variables, and wait until they run."""
        dashboard = ["--dashboard-host=0.0.0.0"] if self.jobs else ["--include-dashboard=false"]
        head = ["--head", "--port=6379", *dashboard]
        role = head if host is self.head else [f"--address={self.address}"]
        options = [f"--node-ip-address={host.address}", f"--num-cpus={self.cpus[host.name]}"]
        store = ["--object-store-memory=300000000", "--disable-usage-stats"]
        done = host.run([*RAY, "start", *role, *options, *store], START_S, env=self.env | env)
        if done.returncode:
            raise OSError(f"Ray does not start on {host.name}: {done.stdout[-2000:]}")

    def practicum(self, *arguments: str, timeout: float, host: Host | None = None, cwd: Path) -> str:
        """Run a practicum command on the head (or another host) and return its output; raise if it fails."""
        command = [sys.executable, "-m", "practicum", *arguments]
        done = (host or self.head).run(command, timeout, env=HOST_ENV, cwd=cwd)
        if done.returncode:
            raise OSError(f"`practicum {' '.join(arguments)}` failed:\n{done.stdout[-4000:]}")
        return done.stdout
