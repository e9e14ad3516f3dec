"""The recipe's engines: what samples and scores."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from practicum.recipe.schema.section import Section

EngineKind = Literal["torch", "vllm"]


class Vllm(Section):
    """Settings of a vLLM engine, which runs in a process of its own."""

    threads: int | None = Field(
        default=None, ge=1, description="Threads of its process on a CPU; unset: as torch's here."
    )
    kv_gb: float | None = Field(
        default=None, gt=0, description="GiB of KV memory; unset: what slots × context tokens take."
    )
    start_s: float = Field(default=300.0, gt=0, description="Seconds in which it must be ready.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Engine arguments of vLLM by its own names, such as block_size or quantization; they "
        "win over those that are set here. It is one process: no tensor_parallel_size.",
    )
