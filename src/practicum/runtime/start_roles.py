"""The roles of a run, in the runtime that its recipe names."""

from __future__ import annotations

from practicum.checks.watch import Watch
from practicum.dataplane.stages import Plan
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.local import start_local
from practicum.runtime.ray.init_ray import set_environment
from practicum.runtime.roles_protocol import Roles


def start_roles(recipe: Recipe, plan: Plan, watch: Watch) -> Roles:
    """Everyone who takes part, ready to work; if that fails, nothing stays behind."""
    if recipe.runtime.kind == "local":
        return start_local(recipe, plan, watch)
    set_environment(recipe.runtime)
    from practicum.runtime.ray.start_ray import start_ray

    return start_ray(recipe, plan, watch)
