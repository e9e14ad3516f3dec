"""Devices and pools that a cluster can't give.

A recipe that runs in one process is not asked: what it says of a cluster is for the runs that have one.
"""

from __future__ import annotations

from collections.abc import Iterator

from practicum.devices import names_one_of_several
from practicum.errors import RecipeError
from practicum.recipe.schema.recipe import Model, Recipe, Train


def check_runtime(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of a recipe that runs on a cluster, and of its optimizer."""
    yield from _optimizer(recipe.train, recipe.model, recipe.data_parallel)
    if not recipe.on_ray:
        return
    devices = {"model": recipe.model.device}
    devices |= {path: model.device for path, model in recipe.own_models.items()}
    for path, device in devices.items():
        if names_one_of_several(device):
            found, advice = f"{device} with runtime.kind ray", "Ray chooses which GPU a process gets"
            yield RecipeError(f"{path}.device", found, f"auto, cpu or {device.partition(':')[0]}", advice)
    pool, replicas, lag = recipe.pools.rollout, recipe.engine_replicas, recipe.rollout.lag
    if pool is None and lag:
        advice = "engines can't share the learner's devices while it works: add rollout: {devices: 1}"
        yield RecipeError("pools.rollout", f"none with rollout.lag {lag}", "a pool of devices", advice)
    if pool is not None and recipe.rollout.engine_devices == 1 and replicas < pool.total:
        advice = "a device without an engine would stay idle: lower pools.rollout, or remove rollout.replicas"
        found = f"{replicas} with {pool.nodes} × {pool.devices} devices in pools.rollout"
        yield RecipeError("rollout.replicas", found, f"at least {pool.total}", advice)


def _optimizer(train: Train, model: Model, ranks: int) -> Iterator[RecipeError]:
    if train.optimizer == "adamw_8bit" and ranks > 1:
        found = f"adamw_8bit with {ranks} data-parallel ranks (pools.train)"
        advice = (
            "blocks of 256 numbers share a scale, and the cut between ranks does not follow them: use one "
            "rank, or adamw with train.offload"
        )
        yield RecipeError("train.optimizer", found, "adamw", advice)
    if train.optimizer == "adamw_8bit" and model.dtype == "float64":
        yield RecipeError("train.optimizer", "adamw_8bit with model.dtype float64", "adamw")
    if train.offload == "host" and model.device == "cpu":
        found = "host with model.device cpu, whose memory is the host's"
        yield RecipeError("train.offload", found, "none")
