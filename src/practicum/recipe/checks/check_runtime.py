"""Devices and pools that a cluster can't give.

A recipe that runs in one process is not asked: what it says of a cluster is for the runs that have one.
"""

from __future__ import annotations

from collections.abc import Iterator

from practicum.devices import names_one_of_several
from practicum.errors import RecipeError
from practicum.recipe.schema.recipe import Recipe


def check_runtime(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of a recipe that runs on a cluster, and of its optimizer."""
    yield from _optimizer(recipe)
    if not recipe.on_ray:
        return
    yield from _devices(recipe)
    yield from _rollout(recipe)
    yield from _teachers(recipe)


def _devices(recipe: Recipe) -> Iterator[RecipeError]:
    """A cluster gives out its GPUs itself."""
    devices = {"model": recipe.model.device}
    devices |= {path: model.device for path, model in recipe.own_models.items()}
    for path, device in devices.items():
        if names_one_of_several(device):
            found, advice = f"{device} with runtime.kind ray", "Ray chooses which GPU a process gets"
            yield RecipeError(f"{path}.device", found, f"auto, cpu or {device.partition(':')[0]}", advice)


def _optimizer(recipe: Recipe) -> Iterator[RecipeError]:
    ranks = recipe.data_parallel
    if recipe.train.optimizer == "adamw_8bit" and ranks > 1:
        found = f"adamw_8bit with {ranks} data-parallel ranks (pools.train)"
        advice = (
            "blocks of 256 numbers share a scale, and the cut between ranks does not follow them: use one "
            "rank, or adamw with train.offload"
        )
        yield RecipeError("train.optimizer", found, "adamw", advice)
    if recipe.train.optimizer == "adamw_8bit" and recipe.model.dtype == "float64":
        yield RecipeError("train.optimizer", "adamw_8bit with model.dtype float64", "adamw")
    if recipe.train.offload == "host" and recipe.model.device == "cpu":
        found = "host with model.device cpu, whose memory is the host's"
        yield RecipeError("train.offload", found, "none")


def _rollout(recipe: Recipe) -> Iterator[RecipeError]:
    pool, replicas = recipe.pools.rollout, recipe.engine_replicas
    if pool is None and recipe.rollout.lag:
        found = f"none with rollout.lag {recipe.rollout.lag}"
        advice = (
            "engines that share the learner's devices can't work while it does: add rollout: {devices: 1}"
        )
        yield RecipeError("pools.rollout", found, "a pool of devices", advice)
    if pool is not None and recipe.engine_devices == 1 and replicas < pool.nodes * pool.devices:
        yield RecipeError(
            "rollout.replicas",
            f"{replicas} with {pool.nodes} × {pool.devices} devices in pools.rollout",
            f"at least {pool.nodes * pool.devices}",
            "a device without an engine would stay idle: lower pools.rollout, or remove rollout.replicas",
        )


def _teachers(recipe: Recipe) -> Iterator[RecipeError]:
    pool, models = recipe.pools.teachers, recipe.own_models
    if pool is None:
        return
    if not models:
        advice = "colocated models share the devices of pools.train: remove it, or set their placement to own"
        found = "a pool without a teacher or reward model of placement own"
        yield RecipeError("pools.teachers", found, "null", advice)
        return
    owns = {path: (model.own_options.replicas, model.model_devices) for path, model in models.items()}
    needs = " + ".join(f"{path} {replicas} × {devices}" for path, (replicas, devices) in owns.items())
    have, wanted = pool.nodes * pool.devices, sum(replicas * devices for replicas, devices in owns.values())
    if wanted != have:
        yield RecipeError(
            "pools.teachers",
            f"{pool.nodes} × {pool.devices} = {have} devices",
            f"{wanted}: {needs}",
            "set the pool to what they take, or their placement.own.replicas and devices to what it has",
        )
    elif max(devices for _, devices in owns.values()) > pool.devices:
        yield RecipeError(
            "pools.teachers",
            f"{pool.nodes} nodes × {pool.devices} devices",
            f"nodes into which these fit, each process on one node: {needs}",
            "choose other numbers of devices for the pool's nodes or for the processes",
        )
