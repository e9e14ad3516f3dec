"""How large a model is, by its config: parameters, what a token costs, what it leaves in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.errors import RecipeError
from practicum.recipe.derived import folder_config, made_sizes, saved_parameters
from practicum.recipe.schema.recipe import Lora, MakeModel, Recipe

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number."""
MADE_VOCABULARY = 63
MADE_VISION_VOCABULARY = 67
"""Tokens of the made models' tokenizers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder. `active` are the parameters that one token is multiplied with.

    `query` and `key` are heads times their width.
    """

    parameters: int
    active: int
    layers: int
    hidden: int
    inner: int
    query: int
    key: int
    vocabulary: int
    context: int | None = None
    experts_per_token: int = 0
    experts: int = 0
    gated: bool = True

    def adapter(self, lora: Lora) -> int:
        """Parameters of a LoRA adapter: for each weight it is on, rank times the sum of both widths."""
        hidden, inner = self.hidden, self.inner
        copies = 1
        widths = {"q_proj": (hidden, self.query), "k_proj": (hidden, self.key), "v_proj": (hidden, self.key)}
        widths |= {"o_proj": (self.query, hidden)}
        if self.experts:
            inner, copies = inner // max(1, self.experts_per_token), self.experts
            mlp = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
        elif self.gated:
            mlp = dict.fromkeys(("gate_proj", "up_proj"), (hidden, inner)) | {"down_proj": (inner, hidden)}
        else:
            widths = {"c_attn": (hidden, self.query + 2 * self.key), "attn.c_proj": (self.query, hidden)}
            mlp = {"c_fc": (hidden, inner), "mlp.c_proj": (inner, hidden)}
        sums = {name: sum(both) for name, both in widths.items()}
        sums |= {name: copies * sum(both) for name, both in mlp.items()}
        if isinstance(lora.targets, list):
            ends = tuple(target.rpartition(".")[2] for target in lora.targets)
            sums = {name: both for name, both in sums.items() if name.endswith(ends)}
        return lora.rank * self.layers * sum(sums.values())

    def flops(self, tokens: float, attended: float) -> float:
        """Operations of a forward pass over tokens, each of which attends to `attended` others."""
        return tokens * (2.0 * self.active + 4.0 * self.layers * self.query * attended)

    def token_kv(self) -> int:
        """Numbers that one token leaves in the KV memory."""
        return 2 * self.layers * self.key

    def token_activations(self, checkpointing: bool) -> int:
        """Numbers that one token leaves for the backward pass (fitted to what torch keeps, within 10 %)."""
        layer = 5 * self.hidden + 4 * self.inner + 4 * (self.query + self.key)
        return self.layers * self.hidden + layer if checkpointing else self.layers * layer


@dataclass(frozen=True)
class Models:
    """Sizes of a recipe's models. `guessed` teachers are not here: they count like the student."""

    student: Sizes
    reference: Sizes
    teachers: Mapping[str, Sizes]
    guessed: tuple[str, ...] = ()

    @property
    def teacher_width(self) -> int:
        """Hidden size of the widest teacher."""
        return max((sizes.hidden for sizes in self.teachers.values()), default=0)


def trained_bytes(recipe: Recipe, sizes: Sizes, *, in_float32: bool = False) -> int:
    """Bytes of the weights that training changes: the student's, or those of its adapter; or of float32
    copies, as the optimizer's are."""
    number = max(BYTES[recipe.model.dtype], BYTES["float32"] if in_float32 else 0)
    if recipe.model.lora is None:
        return sizes.parameters * number
    return sizes.adapter(recipe.model.lora) * max(number, BYTES["float32"])


def models_of(recipe: Recipe) -> Models:
    """By configs and weight files, without loading any; a student without a config is a RecipeError."""
    student = model_sizes(recipe.model.path, recipe.model.make)
    path = recipe.algorithm.kl.reference
    reference = student if path is None else model_sizes(path, None, "algorithm.kl.reference")
    teachers, guessed = dict.fromkeys(recipe.teachers, student), []
    for name, teacher in recipe.teachers.items():
        on_student = teacher.adapter is not None and teacher.model is None
        if teacher.url is not None or teacher.student is not None or on_student:
            continue
        if teacher.model is not None and Path(teacher.model).expanduser().is_dir():
            teachers[name] = model_sizes(teacher.model, None, f"teachers.{name}.model")
        else:
            guessed.append(name)
    return Models(student, reference, teachers, tuple(guessed))


def model_sizes(source: str | None, make: MakeModel | None, key: str = "model.path") -> Sizes:
    """Of a model folder, a hub name or a model that is made; a RecipeError if there is no config."""
    if make is not None:
        return sizes_of(_made(make))
    assert source is not None
    config = folder_config(source) or _hub_config(source, key)
    return sizes_of(config, saved_parameters(Path(source).expanduser()))


def sizes_of(config: Mapping[str, Any], parameters: int | None = None) -> Sizes:
    """By a config.json; `parameters` is their exact number, if it is known."""
    text: Mapping[str, Any] = config.get("text_config") or config
    hidden = _first(text, "hidden_size", "n_embd")
    layers = _first(text, "num_hidden_layers", "n_layer")
    heads = _first(text, "num_attention_heads", "n_head")
    width = text.get("head_dim") or hidden // heads
    query, key = heads * width, (text.get("num_key_value_heads") or heads) * width
    vocabulary = _first(text, "vocab_size")
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    taken = text.get("num_experts_per_tok") or 0
    gated = "n_embd" not in text
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    if experts:
        inner = taken * (text.get("moe_intermediate_size") or inner)
    attention = hidden * 2 * (query + key)
    mlp = (3 if gated else 2) * hidden * inner
    embedding = vocabulary * hidden
    # The embedding is looked up, not multiplied with; the head is, whether or not it is the same matrix.
    active = layers * (attention + mlp + hidden * experts) + embedding
    total = layers * (attention + mlp * (experts / taken if experts else 1) + hidden * experts) + embedding
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", not gated))
    total += 0 if tied else embedding
    context = text.get("max_position_embeddings") or text.get("n_positions")
    total += (context or 0) * hidden if not gated else 0
    total += _tower(config.get("vision_config") or {})
    return Sizes(
        parameters or int(total),
        int(active),
        layers,
        hidden,
        inner,
        query,
        key,
        vocabulary,
        context,
        experts_per_token=taken,
        experts=experts,
        gated=gated,
    )


def _made(make: MakeModel) -> dict[str, Any]:
    """The config of a made model, as far as its size goes."""
    sees = make.family == "qwen2_5_vl"
    vocabulary = MADE_VISION_VOCABULARY if sees else MADE_VOCABULARY
    config = made_sizes(make) | {"vocab_size": vocabulary, "tie_word_embeddings": True}
    if sees:
        vision = {"depth": max(1, make.layers // 2), "hidden_size": make.hidden}
        return config | {"vision_config": vision | {"intermediate_size": 3 * make.hidden}}
    return config


def _tower(vision: Mapping[str, Any]) -> int:
    """Parameters of a vision tower, roughly: its layers, and what joins their patches into tokens."""
    width, inner = vision.get("hidden_size", 0), vision.get("intermediate_size", 0)
    joined = width * vision.get("spatial_merge_size", 2) ** 2
    layers = vision.get("depth", 0) * (4 * width * width + 3 * width * inner)
    return layers + joined * (joined + vision.get("out_hidden_size", width))


def _first(config: Mapping[str, Any], *names: str) -> int:
    value = next((config[name] for name in names if config.get(name)), None)
    if value is None:
        raise RecipeError("model", f"a config without {names[0]}", "a decoder's config.json")
    return int(value)


def _hub_config(source: str, key: str) -> Mapping[str, Any]:
    from practicum.models.model_files import read_config  # a hub's cache is transformers' to read

    try:
        return read_config(source).to_dict()
    except (OSError, ValueError) as error:
        expected = "a folder with config.json, or a hub name"
        raise RecipeError(key, source, expected, str(error).splitlines()[0]) from None
