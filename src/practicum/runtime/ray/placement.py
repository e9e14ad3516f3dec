"""The actors that a recipe needs, the bundles of CPUs and GPUs that they share, and the room for them.

Needs no Ray: a cluster is a list of nodes. Ray's placement groups choose the machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

from practicum.dataplane.stages import Plan
from practicum.devices import is_accelerator_name
from practicum.errors import ClusterError
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.runtime_section import Pool
from practicum.recipe.schema.teacher_sections import RewardModel, Teacher

TRAIN, ROLLOUT, REWARD, STORE = "train", "rollout", "reward", "store"
"""Roles; those of teachers and reward models are their paths in the recipe, such as teachers.math."""
TEACHERS, SERVICES = "teachers", "services"
"""Other pools: of models in separate processes, and of actors that need no device."""
URL_CPUS = 0.1
"""CPUs of an actor that is the client of a server."""
_ROUNDING = 1e-6
"""Sums of fractions of CPUs may be off by this much."""
_KEYS = {
    TRAIN: "pools.train",
    ROLLOUT: "pools.rollout",
    TEACHERS: "placement.own.replicas of teachers and reward models",
    SERVICES: "runtime.reward_workers",
    STORE: "pools.train.nodes",
}
"""The recipe keys that decide the size of a pool."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources on one machine. Those of one `group` of a pool should be on one machine together."""

    pool: str
    group: int
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Actor:
    """One process and its share of a bundle, an index of `Needs.bundles`, or None if it takes no
    resources."""

    role: str
    index: int
    bundle: int | None
    cpus: float
    gpus: float = 0.0
    threads: int = 1


@dataclass(frozen=True)
class Needs:
    actors: tuple[Actor, ...]
    bundles: tuple[Bundle, ...]

    @property
    def cpus(self) -> float:
        return round(sum(bundle.cpus for bundle in self.bundles), 4)

    @property
    def gpus(self) -> float:
        return sum(bundle.gpus for bundle in self.bundles)

    def actor(self, role: str, index: int = 0) -> Actor:
        return next(a for a in self.actors if (a.role, a.index) == (role, index))

    def lines(self) -> list[str]:
        """Describe the pools with their bundles, and the roles with their actors."""
        shapes = Counter((b.pool, b.cpus, b.gpus) for b in self.bundles)
        pools = [f"{pool}: {count} × {amounts(cpus, gpus)}" for (pool, cpus, gpus), count in shapes.items()]
        roles = Counter(actor.role for actor in self.actors)
        actors = ", ".join(f"{count} {role}" for role, count in roles.items())
        return [*pools, f"{len(self.actors)} actors: {actors}"] if actors else pools


class Node(NamedTuple):
    """The resources of a machine."""

    cpus: float
    gpus: float = 0.0


def amounts(cpus: float, gpus: float) -> str:
    """Return resources as text: 2 CPUs and 1 GPU."""
    named = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in named.items())


def uses_gpu(device: str, gpus: bool) -> bool:
    """Return True if a model of this device is put on a GPU. `auto` takes one if the cluster has some."""
    return is_accelerator_name(device) or (device == "auto" and gpus)


def needs(recipe: Recipe, plan: Plan | None = None, *, gpus: bool) -> Needs:
    """Return what the recipe needs, with teachers only if the plan has them. `gpus` is true if the cluster
    has any: then a device of a model that is not on the CPU is a GPU with CPUs."""
    judges = recipe.computes_reward or recipe.evaluates
    holds_models = judges and any(not m.scores_during_rollout for m in recipe.reward.models.values())
    nodes = recipe.pools.train.nodes
    rewards = recipe.runtime.reward_workers if judges else 0
    units = nodes + 1 if recipe.runtime.store == "transferqueue" else 0  # the first is their controller
    shared = [
        *_student(recipe, gpus, rewards if holds_models else 0),
        *_own(recipe.own_models, recipe.model.device, gpus),
        *_services(recipe.teachers, 0 if holds_models else rewards, units),
    ]
    if plan is not None and "teachers" not in plan:
        shared = [entry for entry in shared if not any(role.startswith("teachers.") for role, *_ in entry[1])]
    actors = [Actor(STORE, 0, None, 0.0)]
    for number, (bundle, shares) in enumerate(shared):
        # Rounded down to what Ray counts in.
        cpus, devices = (floor(n * 10_000 / len(shares)) / 10_000 for n in (bundle.cpus, bundle.gpus))
        actors += [Actor(role, index, number, cpus, devices, threads) for role, index, threads in shares]
    actors.sort(key=lambda actor: (actor.role, actor.index))
    return Needs(tuple(actors), tuple(bundle for bundle, _ in shared))


Shared = tuple[Bundle, list[tuple[str, int, int]]]
"""A bundle, and the actors that share it evenly: role, number, threads."""


def _student(recipe: Recipe, gpus: bool, reward_workers: int) -> Iterator[Shared]:
    """Yield learner ranks and engines: together on the devices of train, or in separate pools. Reward workers
    that hold colocated models share the devices of train."""
    pools, threads = recipe.pools, recipe.runtime.threads or 1
    on_gpu = uses_gpu(recipe.model.device, gpus)
    span = recipe.rollout.engine_devices if pools.rollout else 1
    engines = _spread(recipe.engine_replicas, pools.rollout or pools.train, span)
    shared = {TRAIN: _spread(recipe.data_parallel, pools.train)}
    placed = [(TRAIN, pools.train, 1, shared)]
    if pools.rollout is None:
        shared[ROLLOUT] = engines
    else:
        placed.append((ROLLOUT, pools.rollout, span, {ROLLOUT: engines}))
    if reward_workers:
        shared[REWARD] = _spread(reward_workers, pools.train)
    for name, pool, each, roles in placed:
        for device in range(pool.nodes * pool.devices // each):
            shares = [(role, index, threads) for role, numbers in roles.items() for index in numbers[device]]
            group = device * each // pool.devices
            yield Bundle(name, group, float(threads * each), float(on_gpu * each)), shares


def _own(models: Mapping[str, Teacher | RewardModel], device: str, gpus: bool) -> Iterator[Shared]:
    """Yield replicas of teachers and reward models, each on one machine. `device` is the student's."""
    number = 0
    for path, model in models.items():
        own, devices = model.own_options, model.model_devices
        # Copies of the student and adapters on its base are held as the student is.
        on_gpu = uses_gpu(device if model.model is None else model.device, gpus)
        cpus = float(own.threads if on_gpu else own.threads * devices)
        for index in range(own.replicas):
            yield Bundle(TEACHERS, number, cpus, float(devices * on_gpu)), [(path, index, own.threads)]
            number += 1


def _services(teachers: Mapping[str, Teacher], reward_workers: int, units: int) -> Iterator[Shared]:
    """Yield what needs no device: reward workers, clients of servers, TransferQueue."""
    for index in range(reward_workers):
        yield Bundle(SERVICES, index, 1.0), [(REWARD, index, 1)]
    for name, teacher in teachers.items():
        if teacher.url is not None:
            yield Bundle(SERVICES, 0, URL_CPUS), [(f"teachers.{name}", 0, 1)]
    for index in range(units):
        yield Bundle(STORE, index, 1.0), [(STORE, index + 1, 1)]


def _spread(count: int, pool: Pool, each: int = 1) -> Mapping[int, list[int]]:
    """Return the numbers of a role's actors on each device of a pool, or on each `each` devices, in turn."""
    devices = max(1, pool.nodes * pool.devices // each)
    return {device: list(range(device, count, devices)) for device in range(devices)}


def require_room(needs: Needs, nodes: Sequence[Node], *, started_here: bool = False) -> None:
    """Raise a ClusterError if the nodes together have too few CPUs or GPUs, or none has those of a bundle."""
    if _shortages(needs, nodes) or any(
        all(node.cpus < bundle.cpus - _ROUNDING or node.gpus < bundle.gpus for node in nodes)
        for bundle in needs.bundles
    ):
        raise ClusterError(refusal(needs, nodes, started_here=started_here))


def _shortages(needs: Needs, nodes: Sequence[Node]) -> list[str]:
    has = {"CPUs": sum(node.cpus for node in nodes), "GPUs": sum(node.gpus for node in nodes)}
    wanted = {"CPUs": needs.cpus, "GPUs": needs.gpus}
    return [name for name in has if wanted[name] > has[name] + _ROUNDING]


def refusal(needs: Needs, nodes: Sequence[Node], *, started_here: bool = False) -> str:
    """Describe what is wanted and available, and what to change. `started_here` selects the advice for a
    cluster that the run starts itself."""
    short = _shortages(needs, nodes)
    reason = "" if short else ": no machine has the resources that must be on one machine"
    has = amounts(sum(node.cpus for node in nodes), sum(node.gpus for node in nodes))
    pools = dict.fromkeys(bundle.pool for bundle in needs.bundles)
    advice = [f"lower {', '.join(_KEYS[pool] for pool in pools)}"]
    if "GPUs" in short:
        advice.append("without GPUs: set device to cpu or auto where the recipe names a GPU")
    if not started_here:
        advice.append("or add machines to the cluster, or stop other jobs")
    elif "CPUs" in short:
        advice.append(f"or set runtime.cpus to {ceil(needs.cpus)}, which may exceed the cores")
    lines = [
        f"the cluster is too small for this recipe{reason}",
        f"wanted {amounts(needs.cpus, needs.gpus)}, available {has}",
        *(f"  {line}" for line in needs.lines()),
        *(f"  → {line}" for line in advice),
    ]
    return "\n".join(lines)
