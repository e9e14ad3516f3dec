"""What a recipe needs of a cluster: its actors, and the bundles of devices that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor
from pathlib import Path

from practicum.dataplane.fields import field_bytes
from practicum.dataplane.stages import Plan
from practicum.devices import is_accelerator_name
from practicum.recipe.counts import count
from practicum.recipe.derived import (
    computes_reward,
    engine_devices,
    engine_replicas,
    evaluates,
    folder_config,
    model_devices,
    own_models,
    own_options,
    scores_during_rollout,
)
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.runtime_section import Pool

TRAIN, ROLLOUT, REWARD, STORE = "train", "rollout", "reward", "store"
"""Roles; those of teachers and reward models are their paths in the recipe, such as teachers.math."""
TEACHERS, SERVICES = "teachers", "services"
"""Other pools: of models in their own processes, and of actors that need no device."""
PROCESS_BYTES = 300 * 2**20
"""Host memory of a process that has imported torch and transformers, before any weights."""
URL_CPUS = 0.1
"""CPUs of an actor that is the client of a server."""
_TRAINED_COPIES = 4
"""Weights, gradients and the two moments of Adam."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources on one machine. Those of one `group` of a pool should be on one machine together."""

    pool: str
    group: int
    cpus: float
    gpus: float = 0.0
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Actor:
    """One process and its share of a bundle, an index of `Needs.bundles`; None if it takes no resources."""

    role: str
    index: int
    bundle: int | None
    cpus: float
    gpus: float = 0.0
    threads: int = 1


@dataclass(frozen=True)
class Needs:
    """All that a recipe needs; `object_store` is the bytes of one step's rows at their longest."""

    actors: tuple[Actor, ...]
    bundles: tuple[Bundle, ...]
    object_store: int = 0

    @property
    def cpus(self) -> float:
        return round(sum(bundle.cpus for bundle in self.bundles), 4)

    @property
    def gpus(self) -> float:
        return sum(bundle.gpus for bundle in self.bundles)

    @property
    def memory(self) -> int:
        return sum(bundle.memory for bundle in self.bundles)

    def actor(self, role: str, index: int = 0) -> Actor:
        """The actor of a role by its number."""
        return next(a for a in self.actors if (a.role, a.index) == (role, index))

    def lines(self) -> list[str]:
        """Pools with their bundles, and roles with their actors, in words."""
        shapes = Counter((b.pool, b.cpus, b.gpus) for b in self.bundles)
        pools = [f"{pool}: {count} × {amounts(cpus, gpus)}" for (pool, cpus, gpus), count in shapes.items()]
        roles = Counter(actor.role for actor in self.actors)
        actors = ", ".join(f"{count} {role}" for role, count in roles.items())
        return [*pools, f"{len(self.actors)} actors: {actors}"]


def amounts(cpus: float, gpus: float) -> str:
    """Resources in words: 2 CPUs and 1 GPU."""
    parts = [f"{cpus:g} CPU{'' if cpus == 1 else 's'}"]
    if gpus:
        parts.append(f"{gpus:g} GPU{'' if gpus == 1 else 's'}")
    return " and ".join(parts)


def needs(recipe: Recipe, plan: Plan | None = None, *, gpus: bool) -> Needs:
    """What the recipe needs, teachers only if the plan has them; `gpus`: whether the cluster has any.

    A device is a GPU for models whose device is not cpu, with the CPUs that feed it, else CPUs alone.
    """
    shared = [*_student(recipe, gpus), *_own(recipe, gpus), *_services(recipe)]
    if plan is not None and "teachers" not in plan:
        shared = [entry for entry in shared if not any(role.startswith("teachers.") for role, *_ in entry[1])]
    actors = [Actor(STORE, 0, None, 0.0)]
    for number, (bundle, shares) in enumerate(shared):
        cpus, devices = (_share(amount, len(shares)) for amount in (bundle.cpus, bundle.gpus))
        actors += [Actor(role, index, number, cpus, devices, threads) for role, index, threads in shares]
    actors.sort(key=lambda actor: (actor.role, actor.index))
    bundles = tuple(bundle for bundle, _ in shared)
    return Needs(tuple(actors), bundles, 0 if plan is None else step_bytes(recipe, plan))


Shared = tuple[Bundle, list[tuple[str, int, int]]]
"""A bundle, and the actors that share it evenly: role, number, threads."""


def _student(recipe: Recipe, gpus: bool) -> Iterator[Shared]:
    """Learner ranks and engines: together on the devices of train, or in separate pools."""
    pools, threads = recipe.pools, recipe.runtime.threads or 1
    weights = folder_bytes(recipe.model.path) or 0
    on_gpu = uses_gpu(recipe.model.device, gpus)
    ranks = pools.train.nodes * pools.train.devices
    learners = _spread(ranks, pools.train)
    span = engine_devices(recipe) if pools.rollout else 1
    engines = _spread(engine_replicas(recipe), pools.rollout or pools.train, span)
    shared = {TRAIN: learners} | ({} if pools.rollout else {ROLLOUT: engines})
    if _has_colocated_reward_models(recipe):
        shared[REWARD] = _spread(recipe.runtime.reward_workers, pools.train)
    placed = [(TRAIN, pools.train, 1, shared)]
    if pools.rollout is not None:
        placed.append((ROLLOUT, pools.rollout, span, {ROLLOUT: engines}))
    for name, pool, each, roles in placed:
        for device in range(pool.nodes * pool.devices // each):
            shares = [(role, index, threads) for role, numbers in roles.items() for index in numbers[device]]
            models = sum(
                _TRAINED_COPIES * weights // ranks if role == TRAIN else weights for role, *_ in shares
            )
            # An engine of several devices has a process on each of them, beside its own.
            processes = len(shares) * (1 if each == 1 else 1 + each)
            memory = PROCESS_BYTES * processes + (0 if on_gpu else models)
            group = device * each // pool.devices
            yield Bundle(name, group, float(threads * each), float(on_gpu * each), memory), shares


def _own(recipe: Recipe, gpus: bool) -> Iterator[Shared]:
    """Replicas of teachers and reward models, each on one machine."""
    number = 0
    for path, model in own_models(recipe).items():
        own = own_options(model)
        # Copies of the student and adapters on its base are held as the student is.
        source, device = model.model, model.device
        if source is None:
            source, device = recipe.model.path, recipe.model.device
        on_gpu = uses_gpu(device, gpus)
        devices = model_devices(model)
        cpus = float(own.threads if on_gpu else own.threads * devices)
        memory = PROCESS_BYTES + (0 if on_gpu else folder_bytes(source) or 0)
        for index in range(own.replicas):
            bundle = Bundle(TEACHERS, number, cpus, float(devices * on_gpu), memory)
            yield bundle, [(path, index, own.threads)]
            number += 1


def _services(recipe: Recipe) -> Iterator[Shared]:
    """What needs no device: reward workers, clients of servers, TransferQueue."""
    runtime = recipe.runtime
    if (computes_reward(recipe) or evaluates(recipe)) and not _has_colocated_reward_models(recipe):
        for index in range(runtime.reward_workers):
            yield Bundle(SERVICES, index, 1.0, memory=PROCESS_BYTES), [(REWARD, index, 1)]
    for name, teacher in recipe.teachers.items():
        if teacher.url is not None:
            yield Bundle(SERVICES, 0, URL_CPUS, memory=PROCESS_BYTES), [(f"teachers.{name}", 0, 1)]
    if runtime.store.kind == "transferqueue":
        for index in range(runtime.store.units + 1):  # the first is their controller
            unit = round(runtime.store.unit_gb * 2**30) if index else 0
            yield Bundle(STORE, index, 1.0, memory=PROCESS_BYTES + unit), [(STORE, index + 1, 1)]


def _has_colocated_reward_models(recipe: Recipe) -> bool:
    """Whether reward workers hold colocated models, and so share the devices of train."""
    models = recipe.reward.models.values()
    return (computes_reward(recipe) or evaluates(recipe)) and any(
        not scores_during_rollout(model) for model in models
    )


def uses_gpu(device: str, gpus: bool) -> bool:
    """Whether a model of this device is put on a GPU: auto takes one where the cluster has some."""
    return is_accelerator_name(device) or (device == "auto" and gpus)


def _spread(count: int, pool: Pool, each: int = 1) -> Mapping[int, list[int]]:
    """The numbers of a role's actors on each device of a pool, or on each so many of them, in turn."""
    devices = max(1, pool.nodes * pool.devices // each)
    return {device: list(range(device, count, devices)) for device in range(devices)}


def _share(amount: float, parts: int) -> float:
    """An even share, rounded down to what Ray counts in."""
    return floor(amount * 10_000 / parts) / 10_000


def folder_bytes(path: str | None) -> int | None:
    """Size of the weights in a model's folder; None if it is no folder, such as a hub name."""
    folder = Path(path or "").expanduser()
    if path is None or not folder.is_dir():
        return None
    weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    return sum(file.stat().st_size for file in weights)


def step_bytes(recipe: Recipe, plan: Plan) -> int:
    """Least bytes of one step's rows in the store: answers as long as a turn may be, without prompts."""
    widths = {"D": 3, "K": recipe.distill.top_k if recipe.distill is not None else 0}
    if (make := recipe.model.make) is not None:
        widths |= {"H": make.hidden, "L": make.layers, "E": make.experts_per_token}
    else:
        config = folder_config(recipe.model.path)
        text = config.get("text_config") or config
        names = {"H": "hidden_size", "L": "num_hidden_layers", "E": "num_experts_per_tok"}
        widths |= {axis: text.get(name) or 0 for axis, name in names.items()}
    longest = recipe.rollout.max_new_tokens
    tokens = {"response": longest, "sequence": longest}
    written = {name for stage in plan for name in stage.writes}
    return count(recipe).sessions * int(field_bytes(written, tokens, widths))
