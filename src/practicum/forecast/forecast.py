"""A forecast of a recipe on a cluster: who sits where, the memory of each device, and what does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from practicum.errors import ClusterError, RecipeError, RecipeErrors
from practicum.forecast.device_memory import GIB, TIGHT, DeviceMemory, StepSetup, device_memory, models_of
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.section import Section, key
from practicum.recipe.text import yamlfile
from practicum.recipe.text.problems import explain
from practicum.roles.stage_table import make_plan
from practicum.runtime.ray.placement import ActorPlacement, Node, lay_out, needs, uses_gpu


class Machine(Section):
    """Machines of one kind. Without devices, its cores are the devices."""

    name: str = key(..., "What they are called in the plan.")
    count: int = key(1, "Machines of this kind.", ge=1)
    devices: int = key(0, "GPUs of each.", ge=0)
    device_gb: float | None = key(None, "GiB of one GPU.", gt=0)
    cpus: int = key(..., "Processor cores of each.", ge=1)
    memory_gb: float = key(..., "GiB of main memory of each.", gt=0)


class ClusterSpec(Section):
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
    for kind in spec.nodes:
        for number in range(kind.count):
            yield (kind.name if kind.count == 1 else f"{kind.name}-{number}"), kind


SAMPLED_PROMPTS = 256


@dataclass(frozen=True)
class Forecast:
    """All that `practicum plan` prints. `refusals` say what does not fit, `notes` what was assumed."""

    setup: StepSetup
    layout: ActorPlacement | None
    memory: tuple[DeviceMemory, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def forecast(recipe: Recipe, spec: ClusterSpec, prompt_tokens: float) -> Forecast:
    """Return what a step of this recipe needs on this cluster, with prompts of this many tokens."""
    plan, sizes, each = make_plan(recipe), recipe.counts, list(machines(spec))
    has_gpus = any(kind.devices for kind in spec.nodes)
    layout, refusals = None, list[str]()
    if recipe.on_ray:
        started_here = len(each) == 1 and recipe.runtime.address is None
        # A cluster that the run starts on one machine may have more CPUs than the machine has cores.
        cpus = recipe.runtime.cpus if started_here else None
        nodes = [Node(name, cpus or m.cpus, m.devices, m.memory_gb * GIB) for name, m in each]
        try:
            layout = lay_out(needs(recipe, plan, gpus=has_gpus), nodes, started_here=started_here)
        except ClusterError as error:
            refusals.append(str(error))
    setup = StepSetup(
        recipe=recipe,
        plan=plan,
        models=models_of(recipe.model, recipe.algorithm.kl.reference, recipe.teachers),
        prompt_tokens=prompt_tokens,
        rows=sizes.sessions + sizes.baselines,
        on_cpu=not uses_gpu(recipe.model.device, has_gpus),
        ranks=recipe.data_parallel,
        replicas=recipe.engine_replicas,
    )
    limits = [GIB * ((not setup.on_cpu and m.device_gb) or m.memory_gb) for _, m in each]
    memory = device_memory(setup, limits, layout)
    refusals += [device.refusal() for device in memory if device.share > 1]
    close = [device for device in memory if TIGHT < device.share <= 1]
    notes = [f"{d.title}: {d.share:.0%} of its memory, too close to all of it to be sure" for d in close]
    notes += [f"teacher {name}: not here, counted like the student" for name in setup.models.guessed]
    return Forecast(setup, layout, memory, tuple(refusals), tuple(notes))


def mean_prompt_tokens(recipe: Recipe) -> float:
    """Return the mean tokens of the training stream's first prompts."""
    from practicum.models.load_model import load_tokenizer
    from practicum.sessions.chat import make_encoder
    from practicum.tasks.stream import make_stream

    encode = make_encoder(recipe, load_tokenizer(recipe.model))
    stream = make_stream(recipe.tasks, recipe.seed, needs_answer=recipe.tasks_needing_answer)
    return fmean(len(encode(prompt).ids) for prompt in stream.take(SAMPLED_PROMPTS))


def report(result: Forecast) -> str:
    setup = result.setup
    engines = f"{setup.ranks} learner rank{'s' * (setup.ranks > 1)}, {setup.replicas} engine"
    title = (
        f"A step of {setup.recipe.name}: {setup.models.student.parameters:,} parameters in "
        f"{setup.recipe.model.dtype}, {engines}{'s' * (setup.replicas > 1)}, {setup.rows:,} responses to "
        f"prompts of {setup.prompt_tokens:,.0f} tokens"
    )
    lines = [title, "", "placement:", *_placement(result), "", "memory:"]
    for device in result.memory:
        verdict = "does not fit" if device.share > 1 else f"{device.share:.0%}"
        lines.append(f"  {device.title}: {_size(device.total)} of {_size(device.limit)}, {verdict}")
        parts = sorted(device.parts.items(), key=lambda part: -part[1])
        lines.append("    " + ", ".join(f"{name} {_size(size)}" for name, size in parts))
    if result.notes:
        lines += ["", "notes:", *(f"  {note}" for note in result.notes)]
    return "\n".join(lines)


def _placement(result: Forecast) -> Iterator[str]:
    """Yield each bundle, and each machine with its actors."""
    layout = result.layout
    if layout is None:
        yield "  none found" if result.setup.recipe.on_ray else "  all roles in one process"
        return
    yield from (f"  {line}" for line in layout.needs.lines())
    for place, node in enumerate(layout.nodes):
        roles: dict[str, list[str]] = {}
        for actor in layout.needs.actors:
            if actor.bundle is not None and layout.places[actor.bundle] == place:
                roles.setdefault(actor.role, []).append(str(actor.index))
        actors = ", ".join(f"{role} {' '.join(numbers)}" for role, numbers in roles.items())
        yield f"  on {node.name}: {actors or 'nothing'}"


def _size(number: float) -> str:
    units = {" GiB": GIB, " MiB": 2**20, " KiB": 2**10}
    unit, size = next(((unit, size) for unit, size in units.items() if number >= size), (" B", 1))
    return f"{number / size:,.1f}{unit}"
