"""The resources that a run has on a cluster: placement groups, options of its actors, and their end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from practicum.dataplane.stages import Plan
from practicum.devices import WITHOUT_GPUS
from practicum.errors import ClusterError, RecipeError
from practicum.learning.minibatches import critic_cut, student_cut
from practicum.recipe.derived import data_parallel, engine_replicas, own_models, own_options
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.init_ray import (
    connect,
    import_ray,
    is_connected,
    read_nodes,
    this_machine,
    workers_environment,
)
from practicum.runtime.ray.needs import STORE, Actor, Bundle, amounts, needs
from practicum.runtime.ray.placement import ActorPlacement, lay_out, refusal

PATIENCE_S = 20.0
"""Seconds to wait for resources that should be free, or that an ending run is about to give back."""
_NODE = "ray.io/node-id"


class Cluster:
    """Made by `open`. Actors are started with `options` and passed to `register`; `close` ends them all."""

    def __init__(
        self, layout: ActorPlacement, groups: Mapping[str, Any], env: Mapping[str, str], undo: ExitStack
    ) -> None:
        self.layout, self.needs = layout, layout.needs
        self.actors: dict[str, Any] = {}
        self._groups, self._env, self._undo = groups, env, undo

    @classmethod
    def open(cls, recipe: Recipe, plan: Plan | None = None) -> Cluster:
        """Start or join the cluster, and reserve what the recipe needs there.

        A cluster that is too small is a ClusterError with what is wanted and available; if it would be this
        machine, before anything is started. An error leaves nothing running.
        """
        runtime = recipe.runtime
        starts = not is_connected(runtime) and runtime.address is None
        if starts:
            here = this_machine(runtime)
            lay_out(needs(recipe, plan, gpus=here.gpus > 0), [here], started_here=True)
        env = workers_environment(runtime.threads or 1)
        with ExitStack() as undo:
            undo.callback(connect(runtime, env))
            layout = _lay_out(recipe, plan, starts)
            groups = _reserve(layout, starts, undo)
            return cls(layout, groups, env if starts else {}, undo.pop_all())

    def options(self, role: str, index: int = 0) -> dict[str, Any]:
        """What `Actor.options(**…)` takes for this actor of the recipe."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self.needs.actor(role, index)
        options: dict[str, Any] = {
            "num_cpus": actor.cpus,
            "num_gpus": actor.gpus,
            "max_restarts": 0,  # whoever restarts it must give it weights and rows again
        }
        changed = {k: v for k, v in self._environment(actor).items() if self._env.get(k) != v}
        if changed:  # it costs seconds
            options["runtime_env"] = {"env_vars": changed}
        if actor.bundle is not None and (pool := self.needs.bundles[actor.bundle].pool) in self._groups:
            number = _numbers(self.layout, pool).index(actor.bundle)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._groups[pool], placement_group_bundle_index=number
            )
        return options

    def _environment(self, actor: Actor) -> dict[str, str]:
        """The environment of an actor; only those that take GPUs see any."""
        hidden = not actor.gpus and any(node.gpus for node in self.layout.nodes)
        return workers_environment(actor.threads) | (WITHOUT_GPUS if hidden else {})

    def register(self, actor: Any, name: str) -> None:
        """Have `close` end this actor, if it still runs; `actors` has the newest of each name."""
        self.actors[name] = actor
        self._undo.callback(import_ray().kill, actor, no_restart=True)

    def close(self) -> None:
        """End the actors, give their resources back, and stop the cluster if this run started it."""
        self._undo.close()


def _lay_out(recipe: Recipe, plan: Plan | None, starts: bool) -> ActorPlacement:
    """On what is free; or on everything, because another run may just be ending."""
    free, everything = read_nodes()
    bundles = needs(recipe, plan, gpus=any(node.gpus for node in everything))
    try:
        return lay_out(bundles, free, started_here=starts)
    except ClusterError:
        return lay_out(bundles, everything, started_here=starts)


def _reserve(layout: ActorPlacement, starts: bool, undo: ExitStack) -> dict[str, Any]:
    """One placement group for each pool, with each bundle on its node in the layout."""
    from ray.util import placement_group, remove_placement_group

    bundles, groups = layout.needs.bundles, {}
    for pool in dict.fromkeys(bundle.pool for bundle in bundles):
        if pool == STORE:
            continue  # TransferQueue's actors are placed when it starts, in what is left for them
        numbers = _numbers(layout, pool)
        pinned = [{_NODE: layout.node_of(number).id} for number in numbers]
        resources = [_resources(bundles[number]) for number in numbers]
        groups[pool] = placement_group(resources, "PACK", bundle_label_selector=pinned)
        undo.callback(remove_placement_group, groups[pool])
    deadline = time.monotonic() + PATIENCE_S
    for group in groups.values():
        if not group.wait(max(0.1, deadline - time.monotonic())):
            free, _ = read_nodes()
            late = f"the cluster gave no room in {PATIENCE_S:g} s: something else holds it"
            raise ClusterError(f"{late}\n{refusal(layout.needs, free, started_here=starts)}")
    return groups


def _numbers(layout: ActorPlacement, pool: str) -> list[int]:
    """The bundles of a pool, by their numbers."""
    return [number for number, bundle in enumerate(layout.needs.bundles) if bundle.pool == pool]


def _resources(bundle: Bundle) -> dict[str, float]:
    return {"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {})


def check_cluster(recipe: Recipe) -> list[str]:
    """What `practicum check` says of a recipe on a cluster; a RecipeError if ranks can't share its batch."""
    ranks, engines = data_parallel(recipe), engine_replicas(recipe)
    for path, model in own_models(recipe).items():
        if (devices := own_options(model).devices) > 1:
            key, advice = f"{path}.placement.own.devices", "the torch engine runs a model on one device"
            if getattr(model, "engine", "torch") == "vllm":
                advice = f"{path}.vllm.tensor_parallel says over how many devices vLLM splits it"
            raise RecipeError(key, str(devices), "1", advice)
    for cut in (student_cut(recipe), critic_cut(recipe)):
        cut.multiple(ranks)
    plain, with_gpus = (needs(recipe, gpus=gpus) for gpus in (False, True))
    wants = amounts(plain.cpus, plain.gpus)
    if with_gpus.gpus != plain.gpus:
        wants += f", or {amounts(with_gpus.cpus, with_gpus.gpus)} where there are GPUs"
    *pools, actors = plain.lines()
    learner = f"{ranks} data-parallel rank{'s' * (ranks > 1)}"
    return [
        f"ray: {learner}, {engines} engine{'s' * (engines > 1)}; {actors}",
        f"ray: wants {wants} ({'; '.join(pools)})",
    ]
