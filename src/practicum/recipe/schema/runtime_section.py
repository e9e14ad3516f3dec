"""The recipe's machines: where the roles live, and the pools of devices that a cluster gives them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from practicum.recipe.schema.section import Section

RuntimeKind = Literal["local", "ray"]


class StoreChoice(Section):
    """The data plane between processes (kind: ray)."""

    kind: Literal["ray", "transferqueue"] = Field(
        default="ray", description="ray: packed columns in Ray's object store; transferqueue: TransferQueue."
    )
    units: int = Field(default=1, ge=1, description="Storage units of TransferQueue, one CPU each.")
    backend: str = Field(
        default="SimpleStorage", description="Backend of TransferQueue: SimpleStorage, or one installed."
    )
    unit_gb: float = Field(
        default=0.0, ge=0, description="GiB of memory that each storage unit reserves on its machine."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The backend's own options, as TransferQueue names them."
    )


def _or_its_kind(schema: dict[str, Any]) -> None:
    """Lets a JSON schema take `runtime: ray`, which `Layers` spells out, beside the mapping."""
    mapping = dict(schema)
    schema.clear()
    schema["anyOf"] = [mapping["properties"]["kind"], mapping]


class Runtime(Section):
    """Where the roles live; `runtime: ray` is short for {kind: ray}."""

    model_config = ConfigDict(json_schema_extra=_or_its_kind)

    kind: RuntimeKind = Field(
        default="local", description="local: all roles in this process; ray: actors of a Ray cluster."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="torch threads of a process; unset: one per core, on ray shared among pools.train.",
    )
    teachers_gb: float | None = Field(
        default=None,
        gt=0,
        description="Device memory in which sleeping colocated models may stay; unset: all stay on a CPU, "
        "none on another device.",
    )
    teachers_host_gb: float | None = Field(
        default=None,
        gt=0,
        description="Host memory for those that had to leave the device; the rest goes to disk.",
    )
    address: str | None = Field(
        default=None,
        description="Cluster to join: auto, host:port or ray://host:10001; unset: one is started on this "
        "machine and stopped with the run. This and the keys below are read with kind ray only.",
    )
    cpus: int | None = Field(
        default=None,
        ge=1,
        description="Logical CPUs of a cluster that is started here; unset: the machine's.",
    )
    object_store_gb: float | None = Field(
        default=None,
        ge=0.1,
        description="GiB of shared memory of a cluster that is started here; unset: Ray's own choice.",
    )
    store: StoreChoice = Field(default_factory=StoreChoice, description="The data plane between processes.")
    reward_workers: int = Field(default=1, ge=1, description="Processes that judge answers, one CPU each.")
    max_deaths: int = Field(
        default=3,
        ge=0,
        description="Deaths of workers of one role (rollout, reward, a teacher) that a run survives.",
    )
    start_s: float = Field(default=180.0, gt=0, description="Seconds in which all actors must be ready.")
    stage_s: float = Field(default=1800.0, gt=0, description="Seconds one call of a learner may take.")
    store_s: float = Field(default=60.0, gt=0, description="Seconds one call of the store may take.")


class Pool(Section):
    """Devices of a cluster: a GPU each where there are GPUs for the model, else runtime.threads CPUs."""

    nodes: int = Field(default=1, ge=1, description="Groups of devices, each on one machine if possible.")
    devices: int = Field(default=1, ge=1, description="Devices of each of them.")


class Pools(Section):
    """Who gets how much of the cluster; read with runtime.kind ray only."""

    train: Pool = Field(
        default_factory=Pool,
        description="The learner, one data-parallel rank on each device, and colocated models.",
    )
    rollout: Pool | None = Field(
        default=None, description="The student's engines; unset: they share the devices of train."
    )
    teachers: Pool | None = Field(
        default=None,
        description="Teachers and reward models of placement own; unset: as many devices as they need.",
    )
