"""A cluster that this run has room on: its placement groups, the options of its actors, and their end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from practicum.dataplane.plan import Plan
from practicum.errors import ClusterError
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.init_ray import (
    connect,
    import_ray,
    is_connected,
    read_nodes,
    this_machine,
    workers_environment,
)
from practicum.runtime.ray.needs import STORE, Actor, Bundle, needs
from practicum.runtime.ray.placement import ActorPlacement, lay_out, refusal

PATIENCE_S = 20.0
"""Seconds in which room must be given that should be free, or that a run before this one gives back."""
_NODE = "ray.io/node-id"


class Cluster:
    """Made by `open`. Actors are made with `options` and told to `register`; `close` ends them all."""

    def __init__(
        self, layout: ActorPlacement, groups: Mapping[str, Any], env: Mapping[str, str], undo: ExitStack
    ) -> None:
        self.layout, self.needs = layout, layout.needs
        self.actors: dict[str, Any] = {}
        self._groups, self._env, self._undo = groups, env, undo

    @classmethod
    def open(cls, recipe: Recipe, plan: Plan | None = None) -> Cluster:
        """Start or join the cluster and take the room that the recipe needs there.

        A cluster that is too small is a ClusterError with wanted and available; if it would be this
        machine, before anything is started. Nothing stays behind an error.
        """
        runtime = recipe.runtime
        starts = not is_connected(runtime) and runtime.address is None
        if starts:
            here = this_machine(runtime)
            lay_out(needs(recipe, plan, gpus=here.gpus > 0), [here], started_here=True)
        env = workers_environment(runtime.threads or 1)
        with ExitStack() as undo:
            undo.callback(connect(runtime, env))
            layout = _find_room(recipe, plan, starts)
            groups = _take_room(layout, starts, undo)
            return cls(layout, groups, env if starts else {}, undo.pop_all())

    def options(self, role: str, index: int = 0, *, concurrency: int | None = None) -> dict[str, Any]:
        """What `Actor.options(**…)` takes for this actor of the recipe."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self.needs.actor(role, index)
        options: dict[str, Any] = {
            "num_cpus": actor.cpus,
            "num_gpus": actor.gpus,
            "max_restarts": 0,  # who starts it again must give it weights and rows again
        }
        lacking = {k: v for k, v in self._wanted(actor).items() if self._env.get(k) != v}
        if lacking:  # it costs seconds
            options["runtime_env"] = {"env_vars": lacking}
        if concurrency is not None:
            options["max_concurrency"] = concurrency
        if actor.bundle is not None and (pool := self.needs.bundles[actor.bundle].pool) in self._groups:
            number = _numbers(self.layout, pool).index(actor.bundle)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._groups[pool], placement_group_bundle_index=number
            )
        return options

    def _wanted(self, actor: Actor) -> dict[str, str]:
        """The environment of an actor; GPUs are seen only by those that take some."""
        hidden = not actor.gpus and any(node.gpus for node in self.layout.nodes)
        return workers_environment(actor.threads) | ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})

    def register(self, actor: Any, name: str) -> None:
        """`close` will end this actor, if it still runs; the newest of each name is in `actors`."""
        self.actors[name] = actor
        self._undo.callback(import_ray().kill, actor, no_restart=True)

    def close(self) -> None:
        """End the actors, give the room back, and stop the cluster if this run started it."""
        self._undo.close()


def _find_room(recipe: Recipe, plan: Plan | None, starts: bool) -> ActorPlacement:
    """A layout on what is free; or on all there is, because a run before this one may just be ending."""
    free, whole = read_nodes()
    wanted = needs(recipe, plan, gpus=any(node.gpus for node in whole))
    try:
        return lay_out(wanted, free, started_here=starts)
    except ClusterError:
        return lay_out(wanted, whole, started_here=starts)


def _take_room(layout: ActorPlacement, starts: bool, undo: ExitStack) -> dict[str, Any]:
    """One placement group for each pool, with each bundle on the node that the layout found."""
    from ray.util import placement_group, remove_placement_group

    bundles, groups = layout.needs.bundles, {}
    for pool in dict.fromkeys(bundle.pool for bundle in bundles):
        if pool == STORE:
            continue  # TransferQueue places its actors itself, in what is left free for them
        numbers = _numbers(layout, pool)
        pinned = [{_NODE: layout.node_of(number).id} for number in numbers]
        wanted = [_resources(bundles[number]) for number in numbers]
        groups[pool] = placement_group(wanted, "PACK", bundle_label_selector=pinned)
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
