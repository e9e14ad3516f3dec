"""Where workers run, jobs from outside, and hosts with other versions: what docs/cluster.md says of them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import yaml

from tests.hosts.cuts import TITLES
from tests.hosts.network import require
from tests.hosts.ray_hosts import HOST_ENV, RAY, RayHosts
from tests.trainer.recipes import TINY
from tests.trainer.test_ray import STEPS
from tests.trainer.test_run import metrics_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
RUN_S = 200.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """Two hosts with two and three CPUs, a head that takes jobs, and a host outside of the cluster."""
    require()
    cpus = {"head": 0, "worker0": 2, "worker1": 3}
    with RayHosts(cpus, [tmp_path_factory.getbasetemp()], ["outside"], jobs=True) as hosts:
        yield hosts


def recipe_file(hosts: RayHosts, folder: Path, devices: int) -> Path:
    runtime = {"kind": "ray", "address": hosts.address, "threads": 1}
    pools = {"train": {"devices": devices}, "rollout": {"devices": devices}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(TINY | {"runtime": runtime, "pools": pools, "train": STEPS}))
    return path


def test_ranks_share_a_host_and_replicas_share_a_host(hosts: RayHosts, tmp_path: Path):
    command = [sys.executable, "-m", "practicum", "train", str(recipe_file(hosts, tmp_path, 2))]
    run = hosts.head.start([*command, "--out", "run"], env=HOST_ENV, cwd=tmp_path, stdout=PIPE, stderr=STDOUT)
    deadline, most = time.monotonic() + RUN_S, dict[str, Counter[str]]()
    while run.poll() is None and time.monotonic() < deadline:
        for name in ("head", "worker0", "worker1"):
            titles = hosts[name].processes().values()
            workers = Counter(role for role, title in TITLES.items() for t in titles if t.startswith(title))
            most[name] = most.get(name, Counter()) | workers
        time.sleep(0.3)
    if run.poll() is None:
        run.kill()
    assert run.wait(10) == 0, run.communicate()[0][-3000:]
    assert not most.pop("head")
    (ranks,) = [roles for roles in most.values() if roles["learner"]]
    (replicas,) = [roles for roles in most.values() if roles["rollout"]]
    assert (ranks["learner"], ranks["index"], replicas["rollout"]) == (2, 1, 2)
    assert ranks is not replicas
    assert sum(roles["reward"] for roles in most.values()) == 1


def test_a_job_from_outside_brings_its_modules(hosts: RayHosts, tmp_path: Path):
    """As examples/cluster.md describes it: recipe and reward function are on no host of the cluster."""
    sections = {"reward": {"functions": [{"use": "scoring:score"}]}, "train": STEPS}
    files = {
        "scoring.py": "def score(sample):\n    return len(sample.response_text) % 2\n",
        "recipe.yaml": yaml.safe_dump(TINY | sections),
    }
    outside = hosts["outside"]
    outside.run(["mkdir", "-p", "/tmp/project"], 10)
    for name, text in files.items():
        outside.run(["tee", f"/tmp/project/{name}"], 10, text)
    command = [sys.executable, "-m", "practicum", "train", "recipe.yaml", "--out", str(tmp_path / "run")]
    cluster = ["--set", "runtime.kind=ray", "--set", "runtime.address=auto"]
    submit = [*RAY, "job", "submit", "--address", f"http://{hosts.head.address}:8265"]
    folder = ["--runtime-env-json", '{"working_dir": "/tmp/project"}']
    done = outside.run([*submit, *folder, "--", *command, *cluster], RUN_S, env=HOST_ENV)
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(metrics_of(tmp_path / "run")) == 1 + STEPS["steps"]


def test_a_host_with_another_package_version_is_named(hosts: RayHosts, tmp_path: Path):
    """A host on which another version of transformers is found first."""
    found = tmp_path / "packages" / "transformers-0.0.1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    host = hosts["worker1"]
    host.kill()
    host.boot()
    hosts.start_ray(host, PYTHONPATH=f"{found.parent}:{HOST_ENV['PYTHONPATH']}")
    recipe, text = recipe_file(hosts, tmp_path, 1), "left the cluster"
    deadline = time.monotonic() + RUN_S
    try:
        while "left the cluster" in text and time.monotonic() < deadline:  # the host before its restart
            with pytest.raises(OSError, match="failed") as failed:
                hosts.practicum("train", str(recipe), "--out", "run", timeout=RUN_S, cwd=tmp_path)
            text = str(failed.value)
    finally:
        host.kill()
        host.boot()
        hosts.start_ray(host)
    assert f"{host.address} has transformers 0.0.1" in text
    assert hosts["worker0"].address not in text
    assert "Traceback" not in text


def test_ray_refuses_a_host_with_another_version_of_python(hosts: RayHosts, tmp_path: Path):
    """A host whose Python says that it is another one."""
    (tmp_path / "sitecustomize.py").write_text(
        "import collections, sys\n"
        "Version = collections.namedtuple('Version', 'major minor micro releaselevel serial')\n"
        "sys.version_info = Version(*sys.version_info[:2], 99, 'final', 0)\n"
    )
    host = hosts["worker1"]
    host.kill()
    host.boot()
    try:
        with pytest.raises(OSError, match=r"\.99\b"):
            hosts.start_ray(host, PYTHONPATH=f"{tmp_path}:{HOST_ENV['PYTHONPATH']}")
    finally:
        host.kill()
        host.boot()
        hosts.start_ray(host)
