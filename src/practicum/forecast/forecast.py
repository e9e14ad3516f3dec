"""A forecast of a recipe on a cluster: placement, memory, traffic, seconds, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from practicum.errors import ClusterError
from practicum.forecast.cluster_spec import GIB, ClusterSpec, machines
from practicum.forecast.device_memory import TIGHT, DeviceMemory, device_memory
from practicum.forecast.seconds import Cost, calibrate, costs
from practicum.forecast.step_setup import StepSetup, measured_setup, step_setup
from practicum.forecast.workload import MeasuredRun, workload
from practicum.recipe.derived import lag, on_ray
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import make_plan
from practicum.runtime.ray.needs import needs
from practicum.runtime.ray.placement import ActorPlacement, Node, lay_out

OBJECT_STORE_SHARE = 0.3
"""Fraction of a machine's memory that Ray takes for its object store by default."""


@dataclass(frozen=True)
class Forecast:
    """All that `practicum plan` prints. `refusals` say what does not fit, `notes` what was assumed.

    `between` are the seconds of a step that are in no stage.
    """

    setup: StepSetup
    layout: ActorPlacement | None
    memory: tuple[DeviceMemory, ...]
    stages: Mapping[str, Cost]
    between: float
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
    recipe: Recipe,
    spec: ClusterSpec,
    prompt_tokens: Callable[[Recipe], float],
    run: MeasuredRun | None = None,
) -> Forecast:
    """What a step of this recipe will need on this cluster, corrected by a measured run if there is one.

    `prompt_tokens` gives the mean tokens of a recipe's prompts.
    """
    layout, refusals = _place(recipe, spec) if on_ray(recipe) else (None, [])
    each = [machine for _, machine in machines(spec)]
    work = workload(recipe, prompt_tokens(recipe), run)
    setup = step_setup(recipe, work, each, layout)
    factors: dict[str, float] = {}
    between = 0.0
    if run is not None:
        measured = measured_setup(run, spec, prompt_tokens(run.recipe))
        factors = calibrate(measured, run)
        in_stages = sum(seconds for name, seconds in run.seconds.items() if name != "step")
        between = max(0.0, run.seconds["step"] - in_stages) * work.rows / measured.work.rows
    memory = device_memory(setup, each, layout)
    return Forecast(
        setup=setup,
        layout=layout,
        memory=memory,
        stages=costs(setup, factors),
        between=between,
        refusals=(*refusals, *(device.refusal() for device in memory if device.share > 1)),
        notes=tuple(_notes(setup, memory, run)),
    )


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
            GIB * (machine.object_store_gb or OBJECT_STORE_SHARE * machine.memory_gb),
        )
        for name, machine in each
    ]
    try:
        return lay_out(bundles, nodes, started_here=started_here), []
    except ClusterError as error:
        return None, [str(error)]


def _notes(setup: StepSetup, memory: Sequence[DeviceMemory], run: MeasuredRun | None) -> Iterator[str]:
    for device in memory:
        if TIGHT < device.share <= 1:
            yield f"{device.title}: {device.share:.0%} of its memory, too close to all of it to be sure"
    if setup.models.guessed:
        yield f"teachers {', '.join(setup.models.guessed)}: not here, taken to be as large as the student"
    if any(teacher.url is not None for teacher in setup.recipe.teachers.values()):
        yield "teachers behind a URL are taken to answer before the rollout ends"
    if setup.traffic.uncounted:
        yield f"{', '.join(setup.traffic.uncounted)}: not counted, its size differs from row to row"
    if lag(setup.recipe):
        yield "with async.lag, rollout and reward overlap the other stages: a step takes less than their sum"
    if run is None:
        yield "seconds are by the devices' numbers alone: a measured run (--from) would correct them"
    elif run.recipe.runtime.threads is None and not on_ray(run.recipe) and setup.on_cpu:
        yield "the run did not set runtime.threads: it is taken to have used every core"
