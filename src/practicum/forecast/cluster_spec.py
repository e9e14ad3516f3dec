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


class Device(Section):
    """What one device really reaches (not what its data sheet promises)."""

    tflops: float = key(0.07, "10^12 operations a second in matrix products of the model's dtype.", gt=0)
    bandwidth_gbs: float = key(10.0, "GB a second from its memory.", gt=0)
    memory_gb: float | None = key(None, "GiB of its own memory; unset: it uses its machine's.", gt=0)
    layer_us: float = key(
        1000.0, "Microseconds that one layer takes in one forward call, however few its tokens.", ge=0
    )


class Machine(Section):
    """Machines of one kind. Without devices, each `threads` of its cores are a device."""

    name: str = key(..., "What they are called in the plan.")
    count: int = key(1, "Machines of this kind.", ge=1)
    devices: int = key(0, "GPUs of each.", ge=0)
    device: Device = key(Device(), "One GPU; without GPUs one core of the processor.")
    cpus: int = key(..., "Processor cores of each.", ge=1)
    memory_gb: float = key(..., "GiB of main memory of each.", gt=0)
    object_store_gb: float | None = key(
        None, "GiB of Ray's object store; unset: 30 % of the memory, Ray's choice.", gt=0
    )
    network_gbs: float = key(1.0, "GB a second between machines.", gt=0)
    link_gbs: float = key(
        0.25, "GB a second between learner ranks of one machine; processes on cores reach about 0.25.", gt=0
    )


class ClusterSpec(Section):
    """A cluster."""

    nodes: list[Machine] = key(..., "The machines.", min_length=1)
    measured_on: Device | None = key(
        None, "Device that the run of --from was made on; unset: one of the cluster's own."
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
        raise RecipeErrors(str(path), explain(error, {}, ClusterSpec)) from None


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
