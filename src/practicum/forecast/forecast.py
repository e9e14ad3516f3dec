"""A forecast of a recipe on a cluster: its actors, the memory of each device, and what does not fit."""

from __future__ import annotations

import os
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
from practicum.runtime.ray.placement import Needs, Node, needs, require_room, uses_gpu


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


SAMPLED_PROMPTS = 256


@dataclass(frozen=True)
class Forecast:
    """All that `practicum plan` prints. `refusals` say what does not fit, `notes` what was assumed."""

    setup: StepSetup
    wanted: Needs | None
    """Bundles and actors, or None if all roles are in one process."""
    memory: tuple[DeviceMemory, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def forecast(recipe: Recipe, spec: ClusterSpec, prompt_tokens: float) -> Forecast:
    """Return what a step of this recipe needs on this cluster, with prompts of this many tokens."""
    plan, sizes = make_plan(recipe), recipe.counts
    machines = [machine for machine in spec.nodes for _ in range(machine.count)]
    has_gpus = any(machine.devices for machine in machines)
    wanted, refusals = None, list[str]()
    if recipe.on_ray:
        started_here = len(machines) == 1 and recipe.runtime.address is None
        # A cluster that the run starts on one machine may have more CPUs than the machine has cores.
        cpus = recipe.runtime.cpus if started_here else None
        wanted = needs(recipe, plan, gpus=has_gpus)
        try:
            require_room(
                wanted, [Node(cpus or m.cpus, m.devices) for m in machines], started_here=started_here
            )
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
    device_sizes = [machine.device_gb for machine in machines if machine.device_gb and not setup.on_cpu]
    limit = min(device_sizes) if device_sizes else sum(m.memory_gb for m in machines)
    named = " + ".join(f"{m.count} × {m.name}" if m.count > 1 else m.name for m in spec.nodes)
    memory = device_memory(setup, GIB * limit, named, wanted)
    refusals += [device.refusal() for device in memory if device.share > 1]
    close = [device for device in memory if TIGHT < device.share <= 1]
    notes = [f"{d.title}: {d.share:.0%} of its memory, too close to all of it to be sure" for d in close]
    notes += [f"teacher {name}: not here, counted like the student" for name in setup.models.guessed]
    return Forecast(setup, wanted, memory, tuple(refusals), tuple(notes))


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
    placement = ["all roles in one process"] if result.wanted is None else result.wanted.lines()
    lines = [title, "", "placement:", *(f"  {line}" for line in placement), "", "memory:"]
    for device in result.memory:
        verdict = "does not fit" if device.share > 1 else f"{device.share:.0%}"
        lines.append(f"  {device.title}: {_size(device.total)} of {_size(device.limit)}, {verdict}")
        parts = sorted(device.parts.items(), key=lambda part: -part[1])
        lines.append("    " + ", ".join(f"{name} {_size(size)}" for name, size in parts))
    if result.notes:
        lines += ["", "notes:", *(f"  {note}" for note in result.notes)]
    return "\n".join(lines)


def _size(number: float) -> str:
    units = {" GiB": GIB, " MiB": 2**20, " KiB": 2**10}
    unit, size = next(((unit, size) for unit, size in units.items() if number >= size), (" B", 1))
    return f"{number / size:,.1f}{unit}"
