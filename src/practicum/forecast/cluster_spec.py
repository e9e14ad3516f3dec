"""The cluster that a forecast is for: a YAML file of machines and devices, or this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from practicum.errors import RecipeError, RecipeErrors
from practicum.recipe.schema.section import Section, key
from practicum.recipe.text import yamlfile
from practicum.recipe.text.problems import explain

GIB = 2**30


class Machine(Section):
    """Machines of one kind. Without devices, its cores are the devices."""

    name: str = key(..., "What they are called in the plan.")
    count: int = key(1, "Machines of this kind.", ge=1)
    devices: int = key(0, "GPUs of each.", ge=0)
    device_gb: float | None = key(None, "GiB of one GPU.", gt=0)
    cpus: int = key(..., "Processor cores of each.", ge=1)
    memory_gb: float = key(..., "GiB of main memory of each.", gt=0)


class ClusterSpec(Section):
    """A cluster."""

    nodes: list[Machine] = key(..., "The machines.", min_length=1)


def load_spec(path: Path) -> ClusterSpec:
    """Read a cluster's file. The error lists all mistakes."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError("--cluster", f"{path} ({error})", "a YAML file that describes a cluster") from None
    data = yamlfile.parse(text, str(path)).data
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise RecipeErrors(str(path), explain(error, {}, ClusterSpec)) from None


def this_machine() -> ClusterSpec:
    """Return the machine that this runs on, with its cores as devices."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return ClusterSpec(nodes=[Machine(name="this machine", cpus=os.cpu_count() or 1, memory_gb=memory)])


def machines(spec: ClusterSpec) -> Iterator[tuple[str, Machine]]:
    """Yield every single machine with its name."""
    for kind in spec.nodes:
        for number in range(kind.count):
            yield (kind.name if kind.count == 1 else f"{kind.name}-{number}"), kind
