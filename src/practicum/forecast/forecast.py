"""A forecast of a recipe on a cluster: who sits where, the memory of each device, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from practicum.errors import ClusterError
from practicum.forecast.cluster_spec import GIB, ClusterSpec, machines
from practicum.forecast.device_memory import TIGHT, DeviceMemory, StepSetup, device_memory
from practicum.forecast.model_sizes import models_of
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import make_plan
from practicum.runtime.ray.placement import ActorPlacement, Node, lay_out, needs, uses_gpu

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
    layout, refusals = _place(recipe, spec) if recipe.on_ray else (None, [])
    each = [machine for _, machine in machines(spec)]
    sizes = recipe.counts
    setup = StepSetup(
        recipe=recipe,
        plan=make_plan(recipe),
        models=models_of(recipe),
        prompt_tokens=prompt_tokens,
        rows=sizes.sessions + sizes.baselines,
        on_cpu=not uses_gpu(recipe.model.device, any(machine.devices for machine in each)),
        ranks=recipe.data_parallel,
        replicas=recipe.engine_replicas,
    )
    memory = device_memory(setup, each, layout)
    refusals += [device.refusal() for device in memory if device.share > 1]
    notes = [
        f"{device.title}: {device.share:.0%} of its memory, too close to all of it to be sure"
        for device in memory
        if TIGHT < device.share <= 1
    ]
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


def _place(recipe: Recipe, spec: ClusterSpec) -> tuple[ActorPlacement | None, list[str]]:
    bundles = needs(recipe, make_plan(recipe), gpus=any(kind.devices for kind in spec.nodes))
    each = list(machines(spec))
    started_here = len(each) == 1 and recipe.runtime.address is None
    nodes = [
        Node(
            name,
            # A cluster that the run starts on one machine may have more CPUs than the machine has cores.
            (started_here and recipe.runtime.cpus) or machine.cpus,
            machine.devices,
            machine.memory_gb * GIB,
        )
        for name, machine in each
    ]
    try:
        return lay_out(bundles, nodes, started_here=started_here), []
    except ClusterError as error:
        return None, [str(error)]


def report(result: Forecast) -> str:
    """Return the text that `practicum plan` prints."""
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
