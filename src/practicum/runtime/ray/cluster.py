"""The resources of a run on a cluster: placement groups, options of its actors, and their release."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from practicum.dataplane.stages import Plan
from practicum.devices import WITHOUT_GPUS, count_cores, count_gpus
from practicum.errors import ClusterError, RecipeError
from practicum.learning.minibatches import Cut
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.user_functions import passed_functions
from practicum.runtime.ray.init_ray import connect, import_ray, set_environment, workers_environment
from practicum.runtime.ray.placement import STORE, Needs, Node, amounts, needs, refusal, require_room
from practicum.user_code import error_line

PATIENCE_S = 20.0
"""Seconds to wait for resources that an ending run is about to release."""


class Cluster:
    """Made by `open`. Actors are started with `options` and passed to `register`. `close` ends them all."""

    def __init__(
        self, needs: Needs, groups: Mapping[int, tuple[Any, int]], env: Mapping[str, str], undo: ExitStack
    ) -> None:
        """`groups` has the placement group of each bundle, and the bundle's number in it."""
        self.needs, self._groups, self._env, self._undo = needs, groups, env, undo
        self.actors: dict[str, Any] = {}
        self._has_gpus = any(node.gpus for node in _nodes())

    @classmethod
    def open(cls, recipe: Recipe, plan: Plan | None = None) -> Cluster:
        """Start or join the cluster, and reserve what the recipe needs.

        A cluster that is too small is a ClusterError. If it would be this machine, the error comes before
        anything is started. An error leaves nothing running.
        """
        runtime = recipe.runtime
        set_environment(runtime)
        starts = _require_room_here(recipe, plan)
        env = workers_environment(runtime.threads or 1)
        with ExitStack() as undo:
            undo.callback(connect(runtime, env))
            nodes = _nodes()
            wanted = needs(recipe, plan, gpus=any(node.gpus for node in nodes))
            require_room(wanted, nodes, started_here=starts)
            return cls(wanted, _reserve(wanted, starts, undo), env if starts else {}, undo.pop_all())

    def options(self, role: str, index: int = 0) -> dict[str, Any]:
        """Return what `Actor.options(**…)` takes for this actor of the recipe."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self.needs.actor(role, index)
        options: dict[str, Any] = {
            "num_cpus": actor.cpus,
            "num_gpus": actor.gpus,
            "max_restarts": 0,  # whoever restarts it must give it weights and rows again
        }
        hidden = WITHOUT_GPUS if self._has_gpus and not actor.gpus else {}
        environment = workers_environment(actor.threads) | hidden
        if changed := {k: v for k, v in environment.items() if self._env.get(k) != v}:  # it costs seconds
            options["runtime_env"] = {"env_vars": changed}
        if actor.bundle is not None and actor.bundle in self._groups:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(*self._groups[actor.bundle])
        return options

    def register(self, actor: Any, name: str) -> None:
        """Have `close` end this actor, if it still runs. `actors` has the newest of each name."""
        self.actors[name] = actor
        self._undo.callback(import_ray().kill, actor, no_restart=True)

    def close(self) -> None:
        """End the actors, release their resources, and stop the cluster if this run started it."""
        self._undo.close()


def _nodes() -> list[Node]:
    """Return the cluster's machines with all that they have, used or not."""
    return [
        Node(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in import_ray().nodes()
        if node["Alive"]
    ]


def _require_room_here(recipe: Recipe, plan: Plan | None = None) -> bool:
    """Return True if a run would start a cluster here. Raise ClusterError if it is too small."""
    runtime = recipe.runtime
    if import_ray().is_initialized() or runtime.address is not None:
        return False
    here = Node(float(runtime.cpus or count_cores()), float(count_gpus()))
    require_room(needs(recipe, plan, gpus=here.gpus > 0), [here], started_here=True)
    return True


def _reserve(wanted: Needs, starts: bool, undo: ExitStack) -> dict[int, tuple[Any, int]]:
    """Reserve each group of bundles, on one machine if possible. Return each bundle's place in its group."""
    from ray.util import placement_group, remove_placement_group

    members: dict[tuple[str, int], list[int]] = {}
    for number, bundle in enumerate(wanted.bundles):
        if bundle.pool != STORE:  # TransferQueue reserves its own
            members.setdefault((bundle.pool, bundle.group), []).append(number)
    places: dict[int, tuple[Any, int]] = {}
    for numbers in members.values():
        bundles = [wanted.bundles[number] for number in numbers]
        group = placement_group(
            [{"CPU": b.cpus} | ({"GPU": b.gpus} if b.gpus else {}) for b in bundles], "PACK"
        )
        undo.callback(remove_placement_group, group)
        places |= {number: (group, index) for index, number in enumerate(numbers)}
    deadline = time.monotonic() + PATIENCE_S
    missing = [
        wanted.bundles[number]
        for number, (group, _) in places.items()
        if not group.wait(max(0.1, deadline - time.monotonic()))
    ]
    if missing:
        free = import_ray().available_resources()
        node = Node(free.get("CPU", 0.0), free.get("GPU", 0.0))
        late = f"the cluster had no resources for all workers within {PATIENCE_S:g} s: other jobs use it"
        raise ClusterError(f"{late}\n{refusal(Needs((), tuple(missing)), [node], started_here=starts)}")
    return places


def check_cluster(recipe: Recipe, plan: Plan) -> list[str]:
    """Describe what a recipe needs of a cluster.

    Raise a RecipeError if the ranks can't share its batch or workers can't be passed a function of a script,
    and a ClusterError if this machine, where a cluster would be started, is too small.
    """
    for use, function in passed_functions(recipe.model_dump_json()).items():
        try:
            import_ray().cloudpickle.dumps(function)
        except Exception as error:
            found = f"ray, and {use} can't be pickled for its workers: {error_line(error)}"
            advice = "create such objects inside the function, or move the function into a module"
            raise RecipeError("runtime.kind", found, "functions that can be pickled", advice) from None
    _require_room_here(recipe, plan)
    ranks, engines = recipe.data_parallel, recipe.engine_replicas
    Cut(recipe.train.minibatches, recipe.train.minibatch_size).multiple(ranks)
    plain, with_gpus = (needs(recipe, gpus=gpus) for gpus in (False, True))
    wants = amounts(plain.cpus, plain.gpus)
    if with_gpus.gpus != plain.gpus:
        wants += f", or {amounts(with_gpus.cpus, with_gpus.gpus)} on machines with GPUs"
    *pools, actors = plain.lines()
    learner = f"{ranks} data-parallel rank{'s' * (ranks > 1)}"
    return [
        f"ray: {learner}, {engines} engine{'s' * (engines > 1)}; {actors}",
        f"ray: wants {wants} ({'; '.join(pools)})",
    ]
