"""Measure weights from one host to another: `python -m tests.hosts.weights RESULTS.json`.

A learner publishes 64 MiB; one engine, then two engines on the other host read it, by Ray's object store
and by NIXL if it is installed. Seconds are those of a read. Bytes are what the reading host receives.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from practicum.runtime.ray.actor_calls import ask
from practicum.runtime.ray.weight_transport import Manifest, receive
from tests.hosts.ray_hosts import HOST_ENV, RayHosts
from tests.runtime.actors import Publisher

NUMEL, ROUNDS, WAIT_S = 2**22, 5, 120.0
"""Elements of each of the four tensors."""


class Counter:
    """An engine's part, without the engine."""

    def count(self, manifest: Manifest) -> int:
        return sum(tensor.nbytes for _, tensor in receive(manifest, timeout=WAIT_S))


def actor(kind: type, address: str) -> Any:
    node = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == address)
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(kind).options(scheduling_strategy=place).remote()


def transfer(cluster: str, learner: str, engines: str) -> None:
    """Publish and read on these hosts, and print a line of JSON for each read, after one that is not
    counted."""
    ray.init(address=cluster, log_to_driver=False)
    publisher, readers = actor(Publisher, learner), [actor(Counter, engines) for _ in range(2)]
    version = 0
    ways = ["object_store", *(["nixl"] if importlib.util.find_spec("nixl") else [])]
    for way in ways:
        for count in (1, 2):
            for _ in range(ROUNDS + 1):
                version += 1
                call = publisher.publish.remote(version, NUMEL, way)
                manifest = ask([call], timeout=WAIT_S, owner="test", who=["learner"])[0]
                print("begin", flush=True)
                time.sleep(0.3)
                began = time.perf_counter()
                calls = [reader.count.remote(manifest) for reader in readers[:count]]
                ask(calls, timeout=WAIT_S, owner="test", who=["engine"] * count)
                seconds = time.perf_counter() - began
                print(json.dumps({"way": way, "engines": count, "seconds": seconds}), flush=True)
                time.sleep(0.3)


def main() -> None:
    if sys.argv[1] == "--inside":
        transfer(*sys.argv[2:])
        return
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    with RayHosts({"head": 0, "learner": 1, "engines": 1}) as hosts:
        addresses = [hosts["learner"].address, hosts["engines"].address]
        command = [sys.executable, "-m", "tests.hosts.weights", "--inside", hosts.address, *addresses]
        driver = hosts.head.start(command, env=HOST_ENV, stdout=subprocess.PIPE)
        before = 0
        for line in driver.stdout:
            if line.startswith("begin"):
                before = hosts["engines"].bytes()[0]
            elif line.startswith("{"):
                found = json.loads(line)
                received = hosts["engines"].bytes()[0] - before
                mib = {"seconds": found["seconds"], "mib_received": received / 2**20}
                results.setdefault((found["way"], found["engines"]), []).append(mib)
        if driver.wait(60):
            raise SystemExit(f"the transfer ended with exit code {driver.returncode}")
    table = [
        {"way": way, "engines": count, "mib": 4 * NUMEL * 4 / 2**20}
        | {name: median(one[name] for one in rounds[1:]) for name in rounds[0]}
        for (way, count), rounds in results.items()
    ]
    print(json.dumps(table, indent=1))
    Path(sys.argv[1]).write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
