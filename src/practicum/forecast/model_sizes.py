"""How large a model is, by its config alone: parameters, KV memory and activations of a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from practicum.models.load_model import skeleton
from practicum.models.lora import find_targets
from practicum.models.model_files import must_read
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Teacher

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder. `inner` is the MLP's width for a token, `query` and `key` are heads times width."""

    parameters: int
    adapter: int
    """Parameters of its LoRA adapter."""
    linear: int
    """Parameters of its linear layers."""
    layers: int
    hidden: int
    inner: int
    query: int
    key: int
    vocabulary: int
    context: int | None

    def token_kv(self) -> int:
        """Return how many numbers one token leaves in the KV memory."""
        return 2 * self.layers * self.key

    def token_activations(self, checkpointing: bool) -> int:
        """Return how many numbers a token leaves for the backward pass (fitted to torch, within 10 %)."""
        layer = 5 * self.hidden + 4 * self.inner + 4 * (self.query + self.key)
        return self.layers * self.hidden + layer if checkpointing else self.layers * layer


@dataclass(frozen=True)
class Models:
    """Sizes of a recipe's models. `guessed` teachers are not here: they count like the student."""

    student: Sizes
    reference: Sizes
    teachers: Mapping[str, Sizes]
    guessed: tuple[str, ...] = ()


def trained_bytes(model: Model, sizes: Sizes, *, in_float32: bool = False) -> int:
    """Return the bytes of the weights that training changes, or of their copies in the optimizer."""
    number = max(BYTES[model.dtype], BYTES["float32"] if in_float32 else 0)
    if model.lora is None:
        return sizes.parameters * number
    return sizes.adapter * max(number, BYTES["float32"])


def models_of(model: Model, path: str | None, named: Mapping[str, Teacher]) -> Models:
    """Return the sizes of student, reference and teachers; a student without a config is a RecipeError."""
    student = model_sizes(model)
    reference = student if path is None else model_sizes(Model(path=path), "algorithm.kl.reference")
    teachers, guessed = dict.fromkeys(named, student), []
    for name, teacher in named.items():
        on_student = teacher.adapter is not None and teacher.model is None
        if teacher.url is not None or teacher.student is not None or on_student:
            continue
        if teacher.model is not None and Path(teacher.model).expanduser().is_dir():
            teachers[name] = model_sizes(Model(path=teacher.model), f"teachers.{name}.model")
        else:
            guessed.append(name)
    return Models(student, reference, teachers, tuple(guessed))


def model_sizes(spec: Model, key: str = "model.path") -> Sizes:
    """Return the sizes of a model folder, a hub name or a made model; a RecipeError if it has no config."""
    with must_read(spec.path or "", key, "a folder with config.json, or a hub name"):
        model = skeleton(spec)
    config = model.config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    if taken := getattr(config, "num_experts_per_tok", None):
        inner = taken * (getattr(config, "moe_intermediate_size", None) or inner)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    linear = [name for name, module in model.named_modules() if type(module).__name__ == "Linear"]
    adapter = 0
    if spec.lora is not None:
        modules, parameters = find_targets(model, spec.lora.targets)
        adapted = [shapes[name] for name in (*(f"{module}.weight" for module in modules), *parameters)]
        # Of each matrix, of experts each of theirs: rank times the sum of both widths.
        adapter = spec.lora.rank * sum(prod(shape[:-2]) * sum(shape[-2:]) for shape in adapted)
    return Sizes(
        parameters=sum(map(prod, shapes.values())),
        adapter=adapter,
        linear=sum(prod(shapes.get(f"{name}.weight", (0,))) for name in linear),
        layers=config.num_hidden_layers,
        hidden=hidden,
        inner=inner,
        query=heads * width,
        key=(getattr(config, "num_key_value_heads", None) or heads) * width,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
    )
