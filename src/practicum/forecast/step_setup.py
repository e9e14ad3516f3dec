"""A step and what it runs on: the recipe's models, its work, and the cluster's devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from practicum.dataplane.stages import Plan
from practicum.forecast.cluster_spec import ClusterSpec, Device, Machine
from practicum.forecast.model_sizes import Models, Sizes, models_of
from practicum.forecast.workload import MeasuredRun, Traffic, Workload, traffic, workload
from practicum.recipe.derived import data_parallel, engine_replicas, on_ray, own_models
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import make_plan
from practicum.runtime.ray.needs import ROLLOUT, TRAIN, uses_gpu
from practicum.runtime.ray.placement import ActorPlacement


@dataclass(frozen=True)
class StepSetup:
    """`threads` are the cores of one CPU device (1 for a GPU). `network_gbs` is None if weights stay on one
    machine. `cores`, `sampling` and `learning` are of the machine with the fewest cores for its actors: its
    cores, and the threads of its engines and of its learner ranks."""

    recipe: Recipe
    plan: Plan
    models: Models
    work: Workload
    traffic: Traffic
    device: Device
    on_cpu: bool
    ranks: int
    replicas: int
    threads: int = 1
    link_gbs: float = 1.0
    network_gbs: float | None = None
    cores: float = float("inf")
    sampling: int = 1
    learning: int = 1

    @property
    def on_ray(self) -> bool:
        return on_ray(self.recipe)

    @property
    def teachers(self) -> Mapping[str, Sizes]:
        """Teachers that the plan uses."""
        return self.models.teachers if "teachers" in self.plan else {}

    @property
    def flops(self) -> float:
        return self.device.tflops * 1e12 * self.threads

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth_gbs * 1e9 * self.threads


def step_setup(
    recipe: Recipe, work: Workload, machines: Sequence[Machine], layout: ActorPlacement | None
) -> StepSetup:
    """The step on these machines; without a layout, everything is taken to be on the first one."""
    plan, models = make_plan(recipe), models_of(recipe)
    on_cpu = not uses_gpu(recipe.model.device, any(machine.devices for machine in machines))
    places = {role: _places(layout, role) for role in (TRAIN, ROLLOUT)}
    train, engines = ([machines[i] for i in places[role]] or machines[:1] for role in (TRAIN, ROLLOUT))
    train_machines = recipe.pools.train.nodes if layout is None else len(set(places[TRAIN]))
    all_machines = recipe.pools.train.nodes if layout is None else len({*places[TRAIN], *places[ROLLOUT]})
    devices = [machine.device for machine in (*train, *engines) if on_cpu == (machine.devices == 0)]
    ranks, replicas = data_parallel(recipe), engine_replicas(recipe)
    threads = recipe.runtime.threads or (1 if on_ray(recipe) else train[0].cpus)
    cores, sampling, learning = float("inf"), 1, 1
    if on_cpu and layout is not None:
        cores, sampling, learning = _busiest(recipe, layout, machines)
    return StepSetup(
        recipe=recipe,
        plan=plan,
        models=models,
        work=work,
        traffic=traffic(recipe, plan, models, work, ranks, replicas),
        # A GPU machine's file says nothing of its cores: they are taken for plain ones.
        device=min(devices or [Device()], key=lambda device: device.tflops),
        on_cpu=on_cpu,
        ranks=ranks,
        replicas=replicas,
        threads=threads if on_cpu else 1,
        link_gbs=min(machine.network_gbs if train_machines > 1 else machine.link_gbs for machine in train),
        network_gbs=min(machine.network_gbs for machine in engines) if all_machines > 1 else None,
        cores=cores,
        sampling=sampling,
        learning=learning,
    )


def measured_setup(run: MeasuredRun, spec: ClusterSpec, prompt_tokens: float) -> StepSetup:
    """The step that was measured, on the device that it was measured on."""
    machine = spec.nodes[0]
    if spec.measured_on is not None:
        gpus = 0 if spec.measured_on.memory_gb is None else 1
        machine = machine.model_copy(update={"device": spec.measured_on, "devices": gpus})
    return step_setup(run.recipe, workload(run.recipe, prompt_tokens, run), [machine], None)


def _places(layout: ActorPlacement | None, role: str) -> list[int]:
    """The machines of a role's actors, as indices of the layout's nodes."""
    if layout is None:
        return []
    return [layout.places[a.bundle] for a in layout.needs.actors if a.role == role and a.bundle is not None]


def _busiest(recipe: Recipe, layout: ActorPlacement, machines: Sequence[Machine]) -> tuple[float, int, int]:
    """Of the machine with most threads for each core: its cores, threads that sample, threads that learn."""
    sampling, learning = Counter[int](), Counter[int]()
    for actor in layout.needs.actors:
        if actor.bundle is not None and actor.role in (TRAIN, ROLLOUT, *own_models(recipe)):
            threads = learning if actor.role == TRAIN else sampling
            threads[layout.places[actor.bundle]] += actor.threads
    place = max(range(len(machines)), key=lambda i: max(sampling[i], learning[i]) / machines[i].cpus)
    return machines[place].cpus, max(1, sampling[place]), max(1, learning[place])
