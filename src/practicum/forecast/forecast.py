"""A forecast of a recipe on a cluster: placement, memory, traffic, seconds, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from practicum.dataplane.plan import Plan, make_plan
from practicum.errors import ClusterError
from practicum.forecast.cluster_spec import GIB, ClusterSpec, machines
from practicum.forecast.device_memory import TIGHT
from practicum.forecast.forecast_setup import Models, PromptTokens, models_of, setup_of, setup_of_run
from practicum.forecast.held_columns import HeldColumns, held
from practicum.forecast.measured_run import MeasuredRun
from practicum.forecast.seconds import Cost, StageSetup, calibrate, costs
from practicum.forecast.workload import workload
from practicum.recipe.derived import on_ray
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.needs import needs
from practicum.runtime.ray.placement import ActorPlacement, Node, lay_out

OBJECT_STORE_SHARE = 0.3
"""Of a machine's memory, what Ray takes for its object store if it is not told."""


@dataclass(frozen=True)
class Forecast:
    """All that `practicum plan` prints. `refusals` say what does not fit, `notes` what was assumed."""

    setup: StageSetup
    layout: ActorPlacement | None
    held: tuple[HeldColumns, ...]
    stages: Mapping[str, Cost]
    between: float
    """Seconds of a step that are in no stage."""
    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.stages.values()) + self.between

    @property
    def bottleneck(self) -> str:
        """The stage that takes longest."""
        return max(self.stages, key=lambda name: self.stages[name].seconds)


def forecast(
    recipe: Recipe, spec: ClusterSpec, prompt_tokens: PromptTokens, run: MeasuredRun | None = None
) -> Forecast:
    """What a step of this recipe will need on this cluster, corrected by a measured run if there is one."""
    plan, models = make_plan(recipe), models_of(recipe)
    layout, refusals = _place(recipe, plan, spec) if on_ray(recipe) else (None, [])
    each = [machine for _, machine in machines(spec)]
    work = workload(recipe, prompt_tokens(recipe), run)
    setup = setup_of(recipe, plan, models, work, each, layout)
    factors: dict[str, float] = {}
    between = 0.0
    if run is not None:
        then = setup_of_run(run, spec, prompt_tokens)
        factors = calibrate(then, run)
        stages = sum(seconds for name, seconds in run.seconds.items() if name != "step")
        between = max(0.0, run.seconds["step"] - stages) * work.rows / then.work.rows
    found = held(setup, models, each, layout)
    return Forecast(
        setup=setup,
        layout=layout,
        held=found,
        stages=costs(setup, factors),
        between=between,
        refusals=(*refusals, *(one.refusal() for one in found if one.share > 1)),
        notes=tuple(_notes(setup, models, found, run)),
    )


def _place(recipe: Recipe, plan: Plan, spec: ClusterSpec) -> tuple[ActorPlacement | None, list[str]]:
    wanted = needs(recipe, plan, gpus=any(kind.devices for kind in spec.nodes))
    each = list(machines(spec))
    here = len(each) == 1 and recipe.runtime.address is None
    nodes = [
        Node(
            name,
            # A cluster that the run starts on one machine may have more CPUs than the machine has cores.
            recipe.runtime.cpus if here and recipe.runtime.cpus else machine.cpus,
            machine.devices,
            machine.memory_gb * GIB,
            GIB * (machine.object_store_gb or OBJECT_STORE_SHARE * machine.memory_gb),
        )
        for name, machine in each
    ]
    try:
        return lay_out(wanted, nodes, started_here=here), []
    except ClusterError as error:
        return None, [str(error)]


def _notes(
    setup: StageSetup, models: Models, held: tuple[HeldColumns, ...], run: MeasuredRun | None
) -> Iterator[str]:
    recipe = setup.recipe
    for one in held:
        if TIGHT < one.share <= 1:
            yield f"{one.title}: {one.share:.0%} of its memory, too close to all of it to be sure"
    if models.guessed:
        yield f"teachers {', '.join(models.guessed)}: not here, taken to be as large as the student"
    if any(teacher.url is not None for teacher in recipe.teachers.values()):
        yield "teachers behind a URL are taken to answer while the student still rolls out"
    if setup.moved.uncounted:
        yield f"{', '.join(setup.moved.uncounted)}: not counted, its size differs from row to row"
    if run is None:
        yield "seconds are by the devices' numbers alone: a measured run (--from) would correct them"
    elif run.recipe.runtime.threads is None and not on_ray(run.recipe) and setup.on_cpu:
        yield "the run did not set runtime.threads: it is taken to have used every core"
