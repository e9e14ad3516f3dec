"""The recipe's machines: where the roles live, and the pools of devices that a cluster gives them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from practicum.recipe.schema.rollout_sections import ON_RAY
from practicum.recipe.schema.section import Section, key, or_short_form, read_if, read_without

StoreKind = Literal["ray", "transferqueue"]
RuntimeKind = Literal["local", "ray"]

_OWN_CLUSTER = read_without(
    "runtime.address",
    "only a cluster that the run starts itself has a size to choose: remove it, or the address",
)
_ASLEEP = read_if(
    lambda recipe: any(
        not model.scores_during_rollout
        for model in (*recipe.teachers.values(), *recipe.reward.models.values())
    ),
    "without a colocated teacher or reward model",
    "only models that sleep are moved",
)


class Runtime(Section):
    """Where the roles live; `runtime: ray` is short for {kind: ray}."""

    model_config = ConfigDict(json_schema_extra=or_short_form("kind"))

    kind: RuntimeKind = key("local", "local: all roles in this process; ray: actors of a Ray cluster.")
    threads: int | None = key(
        None,
        "torch threads of a process; unset: one per core, on ray shared among pools.train. With rollout.lag, "
        "of the learner and of each engine; unset: half of the cores.",
        ge=1,
    )
    teachers_gb: float | None = key(
        None, "Device memory for colocated models that sleep; unset: all on a CPU, else none.", _ASLEEP, gt=0
    )
    address: str | None = key(
        None,
        "Cluster to join: auto, host:port or ray://host:10001; unset: one is started on this machine and "
        "stopped with the run. This and the keys below are read with kind ray only.",
        ON_RAY,
    )
    cpus: int | None = key(
        None, "Logical CPUs of a cluster that is started here; unset: all.", ON_RAY, _OWN_CLUSTER, ge=1
    )
    store: StoreKind = key(
        "ray", "Data plane. ray: columns in Ray's object store; transferqueue: TransferQueue.", ON_RAY
    )
    max_deaths: int = key(
        3, "Deaths of workers of one role (rollout, reward, a teacher) that a run survives.", ON_RAY, ge=0
    )
    reward_workers: int = key(1, "Processes that judge answers, one CPU each.", ON_RAY, ge=1)
    stage_s: float = key(1800.0, "Seconds one call of a learner may take.", ON_RAY, gt=0)

    @property
    def store_s(self) -> float:
        return min(60.0, self.stage_s)


class Pool(Section):
    """Devices of a cluster: a GPU each where there are GPUs for the model, else runtime.threads CPUs."""

    nodes: int = key(1, "Groups of devices, each on one machine if possible.", ge=1)
    devices: int = key(1, "Devices of each of them.", ge=1)

    @property
    def total(self) -> int:
        return self.nodes * self.devices


class Pools(Section):
    """Who gets how much of the cluster; read with runtime.kind ray only."""

    train: Pool = key(Pool(), "The learner, one data-parallel rank on each device, and colocated models.")
    rollout: Pool | None = key(None, "The student's engines; unset: they share the devices of train.")
