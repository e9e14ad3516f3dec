"""The cluster that a forecast is for: a YAML file of machines and devices, or this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from practicum.errors import RecipeError, RecipeErrors
from practicum.recipe.schema.section import Section
from practicum.recipe.text import yamlfile
from practicum.recipe.text.problems import dotted, shorten
from practicum.recipe.text.type_text import nearest

GIB = 2**30


class Device(Section):
    """What one device really reaches (not what its data sheet promises)."""

    tflops: float = Field(
        default=0.07, gt=0, description="10^12 operations a second in matrix products of the model's dtype."
    )
    bandwidth_gbs: float = Field(default=10.0, gt=0, description="GB a second from its memory.")
    memory_gb: float | None = Field(
        default=None, gt=0, description="GiB of its own memory; unset: it uses its machine's."
    )
    layer_us: float = Field(
        default=1000.0,
        ge=0,
        description="Microseconds that one layer takes in one forward call, however few its tokens.",
    )


class Machine(Section):
    """Machines of one kind. Without devices, each `threads` of its cores are a device."""

    name: str = Field(description="What they are called in the plan.")
    count: int = Field(default=1, ge=1, description="Machines of this kind.")
    devices: int = Field(default=0, ge=0, description="GPUs of each.")
    device: Device = Field(
        default_factory=Device, description="One GPU; without GPUs one core of the processor."
    )
    cpus: int = Field(ge=1, description="Processor cores of each.")
    memory_gb: float = Field(gt=0, description="GiB of main memory of each.")
    object_store_gb: float | None = Field(
        default=None, gt=0, description="GiB of Ray's object store; unset: 30 % of the memory, Ray's choice."
    )
    network_gbs: float = Field(default=1.0, gt=0, description="GB a second between machines.")
    link_gbs: float = Field(
        default=0.25,
        gt=0,
        description="GB a second between learner ranks of one machine; processes on cores reach about 0.25.",
    )


class ClusterSpec(Section):
    """A cluster."""

    nodes: list[Machine] = Field(min_length=1, description="The machines.")
    measured_on: Device | None = Field(
        default=None,
        description="Device that the run of --from was made on; unset: one of the cluster's own.",
    )


def load_spec(path: Path) -> ClusterSpec:
    """Read a cluster's file; the error lists all mistakes."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise RecipeError(
            "--cluster", f"{reason}: {path}", "a file that describes a cluster (YAML)"
        ) from None
    data = yamlfile.parse(text, str(path)).data
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise RecipeErrors(str(path), list(_problems(error))) from None


def this_machine(device_gb: float | None = None) -> ClusterSpec:
    """The machine that this runs on, with one accelerator of this many GiB; without, its cores as devices."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    machine = Machine(name="this machine", cpus=os.cpu_count() or 1, memory_gb=memory)
    if device_gb is not None:
        machine = machine.model_copy(update={"devices": 1, "device": Device(memory_gb=device_gb)})
    return ClusterSpec(nodes=[machine])


def machines(spec: ClusterSpec) -> Iterator[tuple[str, Machine]]:
    """Every single machine, with its own name."""
    for kind in spec.nodes:
        for number in range(kind.count):
            yield (kind.name if kind.count == 1 else f"{kind.name}-{number}"), kind


def _problems(error: ValidationError) -> Iterator[RecipeError]:
    keys = [key for section in (ClusterSpec, Machine, Device) for key in section.model_fields]
    for details in error.errors(include_url=False):
        location = details["loc"] or ("",)
        path, key = dotted(location).replace("the recipe", "the file"), str(location[-1])
        if details["type"] == "extra_forbidden":
            close = nearest(key, keys)
            advice = f"did you mean {close}?" if close else ""
            yield RecipeError(path, "an unknown key", f"one of {', '.join(keys)}", advice)
        elif details["type"] == "missing":
            yield RecipeError(path, "nothing", "a value", f"add the key {key}")
        else:
            expected = details["msg"].removeprefix("Input should be ")
            yield RecipeError(path, shorten(details["input"]), expected)
