"""Sections of the runtime: local process or Ray, and the pools of devices of a cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from practicum.recipe.schema.rollout_sections import ON_RAY
from practicum.recipe.schema.section import Section, key, or_short_form, read_if, read_without

StoreKind = Literal["ray", "transferqueue"]
RuntimeKind = Literal["local", "ray"]

_OWN_CLUSTER = read_without(
    "runtime.address", "only a cluster started by this run has a configurable size: remove it, or the address"
)
_ASLEEP = read_if(
    lambda recipe: any(
        not model.scores_during_rollout
        for model in (*recipe.teachers.values(), *recipe.reward.models.values())
    ),
    "without a colocated teacher or reward model",
    "only sleeping models are moved",
)


class Runtime(Section):
    """Local process or Ray cluster. `runtime: ray` is short for {kind: ray}."""

    model_config = ConfigDict(json_schema_extra=or_short_form("kind"))

    kind: RuntimeKind = key("local", "local runs all roles in this process, ray as actors of a Ray cluster.")
    threads: int | None = key(
        None,
        "torch threads per process. Default: one per core, on Ray divided among pools.train. With "
        "rollout.lag, threads of the learner and of each engine. Default then: half of the cores.",
        ge=1,
    )
    teachers_gb: float | None = key(
        None,
        "Device memory in GB that sleeping colocated models may keep. Default: all on a CPU, none on a GPU.",
        _ASLEEP,
        gt=0,
    )
    address: str | None = key(
        None,
        "Ray cluster to join: auto, host:port or ray://host:10001. Default: start one on this machine for "
        "the run. This and the keys below need kind ray.",
        ON_RAY,
    )
    cpus: int | None = key(
        None, "Logical CPUs of a cluster started by this run. Default: all.", ON_RAY, _OWN_CLUSTER, ge=1
    )
    store: StoreKind = key("ray", "Data plane: Ray's object store, or TransferQueue.", ON_RAY)
    max_deaths: int = key(
        3,
        "Number of worker deaths per role (rollout, reward, a teacher) that the run survives.",
        ON_RAY,
        ge=0,
    )
    reward_workers: int = key(1, "Number of reward worker processes, with one CPU each.", ON_RAY, ge=1)
    stage_s: float = key(1800.0, "Deadline of one call of the learner in seconds.", ON_RAY, gt=0)

    @property
    def store_s(self) -> float:
        return min(60.0, self.stage_s)


class Pool(Section):
    """Devices of a cluster: one GPU each, or runtime.threads CPUs each on a cluster without GPUs."""

    nodes: int = key(1, "Number of nodes. The devices of each are on one machine if possible.", ge=1)
    devices: int = key(1, "Devices per node.", ge=1)

    @property
    def total(self) -> int:
        return self.nodes * self.devices


class Pools(Section):
    """Devices of the learner and the engines (runtime.kind ray only)."""

    train: Pool = key(
        Pool(), "Devices of the learner, with one data-parallel rank each, and of colocated models."
    )
    rollout: Pool | None = key(None, "Devices of the student's engines. Default: shared with pools.train.")
