"""Memory of the cluster's devices, or of its machines where their cores are the devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from practicum.forecast.cluster_spec import GIB, Machine
from practicum.forecast.device_memory import MemoryUse, engine_use, learner_use, teacher_use
from practicum.forecast.forecast_setup import Models
from practicum.forecast.seconds import StageSetup
from practicum.recipe.derived import own_models, own_options, scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.needs import ROLLOUT, TRAIN
from practicum.runtime.ray.placement import ActorPlacement

_ADVICE = {
    "KV memory": "lower rollout.slots or rollout.context, or give engines their own devices (pools.rollout)",
    "activations": "lower train.microbatch_tokens, or set train.gradient_checkpointing",
    "teachers": "give teachers a placement of their own",
    "engine's weights": "give engines devices of their own (pools.rollout)",
}


@dataclass(frozen=True)
class HeldColumns:
    """What a device or machine holds, and how much it has."""

    title: str
    use: MemoryUse
    limit: float

    @property
    def share(self) -> float:
        return self.use.total / self.limit

    def refusal(self) -> str:
        """That it is too small, and what to do."""
        name, size = max(self.use.parts.items(), key=lambda part: part[1])
        return (
            f"{self.title} has {self.limit / GIB:.1f} GiB and would need {self.use.total / GIB:.1f}: most of "
            f"it is {name} ({size / GIB:.1f} GiB)\n"
            f"  → {_ADVICE.get(name, 'raise pools.train.devices, or take model.dtype bfloat16')}"
        )


def held(
    setup: StageSetup, models: Models, machines: Sequence[Machine], layout: ActorPlacement | None
) -> tuple[HeldColumns, ...]:
    """What is held where, the same once only; without a layout on the first machine's device alone."""
    uses = dict(_uses(setup, models))
    if layout is None:
        own = None if setup.on_cpu else machines[0].device.memory_gb
        title = "a device of train" if setup.on_ray else "this process"
        limit = GIB * (own or machines[0].memory_gb)
        return (HeldColumns(title, _joined([uses[TRAIN], uses[ROLLOUT]]), limit),)
    bundles = {
        number: [a.role for a in layout.needs.actors if a.bundle == number and a.role in uses]
        for number in range(len(layout.needs.bundles))
    }
    if setup.on_cpu:
        found = []
        for place, node in enumerate(layout.nodes):
            here = [r for number, roles in bundles.items() if layout.places[number] == place for r in roles]
            if here:
                found.append(HeldColumns(node.name, _joined([uses[role] for role in here]), node.memory))
        return tuple(found)
    devices: dict[str, HeldColumns] = {}
    for number, roles in bundles.items():
        if not roles:
            continue
        machine = machines[layout.places[number]]
        title = f"a device of {layout.needs.bundles[number].pool} ({', '.join(dict.fromkeys(roles))})"
        limit = GIB * (machine.device.memory_gb or machine.memory_gb)
        one = HeldColumns(title, _joined([uses[role] for role in roles]), limit)
        if title not in devices or one.share > devices[title].share:
            devices[title] = one
    return tuple(devices.values())


def _uses(setup: StageSetup, models: Models) -> Iterator[tuple[str, MemoryUse]]:
    """What each role's actor holds. Reward models are not counted: their sizes are their judges' affair."""
    recipe: Recipe = setup.recipe
    here = {name: (models.teachers[name], recipe.teachers[name].dtype) for name in setup.teachers}
    here = {name: one for name, one in here.items() if not scores_during_rollout(recipe.teachers[name])}
    yield (
        TRAIN,
        learner_use(
            recipe,
            setup.plan,
            models.student,
            models.reference,
            here,
            ranks=setup.ranks,
            on_cpu=setup.on_cpu,
        ),
    )
    yield ROLLOUT, engine_use(recipe, models.student, shares_weights=not setup.on_ray)
    for path, model in own_models(recipe).items():
        sizes = models.teachers.get(path.removeprefix("teachers."))
        if sizes is not None:
            yield path, teacher_use(sizes, model.dtype, model.batch_tokens, own_options(model).devices)


def _joined(uses: Sequence[MemoryUse]) -> MemoryUse:
    parts: dict[str, float] = {}
    for use in uses:
        for name, size in use.parts.items():
            parts[name] = parts.get(name, 0.0) + size
    return MemoryUse(parts)
