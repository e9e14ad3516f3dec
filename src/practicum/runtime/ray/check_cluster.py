"""What `practicum check` says of a recipe that runs on a cluster."""

from __future__ import annotations

from practicum.errors import RecipeError
from practicum.learning.minibatches import critic_cut, student_cut
from practicum.recipe.derived import data_parallel, engine_replicas, own_models, own_options
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.needs import amounts, needs


def check_cluster(recipe: Recipe) -> list[str]:
    """Ranks, engines, actors and what they want; what they can't share or use is a RecipeError."""
    ranks, engines = data_parallel(recipe), engine_replicas(recipe)
    for path, model in own_models(recipe).items():
        if (devices := own_options(model).devices) > 1:
            key, advice = f"{path}.placement.own.devices", "the torch engine runs a model on one device"
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
