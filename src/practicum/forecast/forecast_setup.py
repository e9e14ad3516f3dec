"""A recipe's step on a cluster's machines, as the model of seconds wants it; and that of a measured run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.dataplane.plan import Plan, make_plan
from practicum.forecast.cluster_spec import ClusterSpec, Device, Machine
from practicum.forecast.measured_run import MeasuredRun
from practicum.forecast.model_sizes import Sizes, model_sizes
from practicum.forecast.seconds import StageSetup
from practicum.forecast.traffic import traffic
from practicum.forecast.workload import Workload, workload
from practicum.recipe.derived import data_parallel, engine_replicas, on_ray, own_models
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.needs import ROLLOUT, TRAIN, uses_gpu
from practicum.runtime.ray.placement import ActorPlacement

PromptTokens = Callable[[Recipe], float]
"""Mean tokens of a recipe's prompts."""


@dataclass(frozen=True)
class Models:
    """Sizes of a recipe's models. `guessed` are teachers that are not here: they count like it."""

    student: Sizes
    reference: Sizes
    teachers: Mapping[str, Sizes]
    guessed: tuple[str, ...] = ()


def models_of(recipe: Recipe) -> Models:
    """By configs and weight files, without loading any; a student without a config is a RecipeError."""
    student = model_sizes(recipe.model.path, recipe.model.make)
    path = recipe.algorithm.kl.reference
    reference = student if path is None else model_sizes(path, None, "algorithm.kl.reference")
    teachers, guessed = dict.fromkeys(recipe.teachers, student), []
    for name, teacher in recipe.teachers.items():
        if teacher.url is not None or teacher.student is not None:
            continue
        if teacher.model is not None and Path(teacher.model).expanduser().is_dir():
            teachers[name] = model_sizes(teacher.model, None, f"teachers.{name}.model")
        else:
            guessed.append(name)
    return Models(student, reference, teachers, tuple(guessed))


def setup_of(
    recipe: Recipe,
    plan: Plan,
    models: Models,
    work: Workload,
    machines: Sequence[Machine],
    layout: ActorPlacement | None,
) -> StageSetup:
    """The step on these machines; without a layout, all is taken to be on the first, if one node is asked."""
    on_cpu = not uses_gpu(recipe.model.device, any(machine.devices for machine in machines))
    places = {role: places_of(layout, role) for role in (TRAIN, ROLLOUT)}
    train, engines = ([machines[i] for i in places[role]] or machines[:1] for role in (TRAIN, ROLLOUT))
    spread = recipe.pools.train.nodes if layout is None else len(set(places[TRAIN]))
    apart = recipe.pools.train.nodes if layout is None else len({*places[TRAIN], *places[ROLLOUT]})
    devices = [machine.device for machine in (*train, *engines) if on_cpu == (machine.devices == 0)]
    ranks, replicas = data_parallel(recipe), engine_replicas(recipe)
    width = max((sizes.hidden for sizes in models.teachers.values()), default=0)
    return StageSetup(
        recipe=recipe,
        plan=plan,
        sizes=models.student,
        reference=models.reference,
        teachers=models.teachers if "teachers" in plan else {},
        work=work,
        moved=traffic(
            recipe, plan, models.student, work, ranks=ranks, replicas=replicas, teacher_width=width
        ),
        # GPU machines say nothing of their cores: those are taken for plain ones.
        device=min(devices or [Device()], key=lambda device: device.tflops),
        on_cpu=on_cpu,
        on_ray=on_ray(recipe),
        ranks=ranks,
        replicas=replicas,
        threads=_threads(recipe, train[0]) if on_cpu else 1,
        link_gbs=min(_speed(machine, spread) for machine in train),
        network_gbs=min(machine.network_gbs for machine in engines) if apart > 1 else None,
        **(_crowd(recipe, layout, machines) if on_cpu else {}),
    )


def setup_of_run(run: MeasuredRun, spec: ClusterSpec, prompt_tokens: PromptTokens) -> StageSetup:
    """The step that was measured, on the device that it was measured on."""
    machine = spec.nodes[0]
    if spec.measured_on is not None:
        gpus = 0 if spec.measured_on.memory_gb is None else 1
        machine = machine.model_copy(update={"device": spec.measured_on, "devices": gpus})
    recipe, plan = run.recipe, make_plan(run.recipe)
    work = workload(recipe, prompt_tokens(recipe), run)
    return setup_of(recipe, plan, models_of(recipe), work, [machine], None)


def places_of(layout: ActorPlacement | None, role: str) -> list[int]:
    """The machines of a role's actors, as places in the layout's nodes."""
    if layout is None:
        return []
    return [layout.places[a.bundle] for a in layout.needs.actors if a.role == role and a.bundle is not None]


def _threads(recipe: Recipe, machine: Machine) -> int:
    """Threads of a CPU device."""
    return recipe.runtime.threads or (1 if on_ray(recipe) else machine.cpus)


def _speed(machine: Machine, count: int) -> float:
    return machine.network_gbs if count > 1 else machine.link_gbs


def _crowd(recipe: Recipe, layout: ActorPlacement | None, machines: Sequence[Machine]) -> dict[str, Any]:
    """Threads that sample and threads that learn on the machine that has most of them for its cores."""
    if layout is None:
        return {}
    busy: dict[str, Counter[int]] = {}
    for phase, roles in {"sampling": {ROLLOUT, *own_models(recipe)}, "learning": {TRAIN}}.items():
        busy[phase] = Counter()
        for actor in layout.needs.actors:
            if actor.role in roles and actor.bundle is not None:
                busy[phase][layout.places[actor.bundle]] += actor.threads

    def threads(place: int) -> int:
        return max(counts[place] for counts in busy.values())

    fullest = max(range(len(machines)), key=lambda place: threads(place) / machines[place].cpus)
    counts = {phase: max(1, found[fullest]) for phase, found in busy.items()}
    return {"cores": machines[fullest].cpus} | counts
