"""Sizes of models by their configs, and the memory of devices, or of machines whose cores are the devices."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from practicum.dataplane.stages import Plan
from practicum.engines.table import ENGINES
from practicum.models.load_model import skeleton
from practicum.models.lora import find_targets
from practicum.models.model_files import must_read
from practicum.models.state_layers import count_memory
from practicum.recipe.counts import CHUNK_LOGITS, CPU_MICROBATCH_TOKENS, KV_POSITIONS, KV_SPARE
from practicum.recipe.derived import adapter_folder, base_groups, saved_parameters
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.runtime.ray.placement import ROLLOUT, TRAIN, Needs

GIB = 2**30
TIGHT = 0.9
"""Fraction of a device above which a forecast warns: allocators and libraries need some memory too."""
EIGHT_BIT = (1 + 4 / 256) / 4
"""Bytes of 8-bit moments, with a scale for each block of 256, as a fraction of float32's."""
Parts = Mapping[str, float]
"""Bytes by what they hold."""
_ADVICE = {
    "KV memory": "lower rollout.max_num_seqs or rollout.context, or give engines devices (pools.rollout)",
    "gradients of each teacher": "set route.measure_every: 0",
    "activations": "lower train.microbatch_tokens, or set train.gradient_checkpointing",
    "published weights": "uninstall nixl, or lower rollout.lag",
    "teachers": "give teachers their own devices (placement: own)",
    "Adam's moments": "take train.optimizer adamw_8bit or train.offload, or raise pools.train.devices",
    "engine's weights": "give engines their own devices (pools.rollout), or split each over several "
    "(rollout.vllm.tensor_parallel_size)",
}
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
    attending: int
    """Layers with keys and values."""
    state_bytes: int
    """Of a sequence, in all layers that carry a state."""
    hidden: int
    inner: int
    query: int
    key: int
    vocabulary: int
    context: int | None

    def token_kv(self) -> int:
        """Return how many numbers one token leaves in the KV memory."""
        return 2 * self.attending * self.key

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
    """Return the sizes of student, reference and teachers. A student without a config is a RecipeError."""
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
    """Return the sizes of a folder, hub name or random_init. Raise RecipeError without a config."""
    with must_read(spec.path or "", key, "a folder with config.json, or a hub name"):
        model = skeleton(spec, getattr(torch, spec.dtype))
    config = model.config.get_text_config()
    hidden, heads = config.hidden_size, getattr(config, "num_attention_heads", 0)  # 0: no layer attends
    width = getattr(config, "head_dim", None) or hidden // max(1, heads)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    if taken := getattr(config, "num_experts_per_tok", None):
        inner = taken * (getattr(config, "moe_intermediate_size", None) or inner)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    linear = [name for name, module in model.named_modules() if type(module).__name__ == "Linear"]
    attending, state_bytes = count_memory(model, hidden)
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
        attending=attending if attending or state_bytes else config.num_hidden_layers,
        state_bytes=state_bytes,
        hidden=hidden,
        inner=inner,
        query=heads * width,
        key=(getattr(config, "num_key_value_heads", None) or heads) * width,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
    )


@dataclass(frozen=True)
class StepSetup:
    """The properties of a step that its memory depends on."""

    recipe: Recipe
    plan: Plan
    models: Models
    prompt_tokens: float
    rows: int
    on_cpu: bool
    ranks: int
    replicas: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that a device or machine holds, by part, and how many it has."""

    title: str
    parts: Parts
    limit: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        return self.total / self.limit

    def refusal(self) -> str:
        name, size = max(self.parts.items(), key=lambda part: part[1])
        return (
            f"{self.title} has {self.limit / GIB:.1f} GiB and would need {self.total / GIB:.1f}: most of "
            f"it is {name} ({size / GIB:.1f} GiB)\n"
            f"  → {_ADVICE.get(name, 'raise pools.train.devices, or take model.dtype bfloat16')}"
        )


def device_memory(
    setup: StepSetup, limit: float, machines: str, wanted: Needs | None
) -> tuple[DeviceMemory, ...]:
    """Return each kind of device, or on the CPU what all `machines` hold together. `limit` is the bytes of
    the smallest device, or of all machines. Without `wanted`, all is in this process."""
    uses = _uses(setup)
    if wanted is None:
        return (DeviceMemory("this process", _joined([uses[TRAIN], uses[ROLLOUT]]), limit),)
    devices: dict[str, DeviceMemory] = {}
    for number, bundle in enumerate(wanted.bundles):
        roles = [a.role for a in wanted.actors if a.bundle == number and a.role in uses]
        if roles:
            title = f"a device of {bundle.pool} ({', '.join(dict.fromkeys(roles))})"
            before = devices.get(machines) if setup.on_cpu else None
            parts = _joined([before.parts if before else {}, *(uses[role] for role in roles)])
            device = DeviceMemory(machines if setup.on_cpu else title, parts, limit)
            if setup.on_cpu or title not in devices or device.share > devices[title].share:
                devices[device.title] = device
    return tuple(devices.values())


def engine_memory(setup: StepSetup, *, shares_weights: bool) -> Parts:
    """Return the memory of the student's engines in a process, rollout.lag + 1 of them.

    Their weights (unless they are the learner's, as without a lag), those packed for decoding, and KV memory.
    The torch engine's grows with the sequences, of which only those of agents fill the whole context.
    """
    recipe, sizes, rollout = setup.recipe, setup.models.student, setup.recipe.rollout
    number, copies = BYTES[recipe.model.dtype], recipe.sampling_engines
    is_ours, has_turns = ENGINES[rollout.engine].shares_model, recipe.agent.loop != "single_turn"
    context = rollout.context_for(sizes.context)
    tokens: float = rollout.max_num_seqs * context * (2 if has_turns else 1)
    if is_ours and not has_turns:
        used = min(rollout.max_num_seqs, math.ceil(setup.rows / setup.replicas))
        grown = used * min(context, KV_SPARE * (setup.prompt_tokens + rollout.max_new_tokens))
        tokens = max(grown, rollout.max_num_seqs * min(context, KV_POSITIONS))
    weights = {"engine's weights": float(copies * sizes.parameters * number)}
    parts = {"KV memory": float(copies * tokens * sizes.token_kv() * number)}
    if sizes.state_bytes:
        parts["states"] = float(copies * rollout.max_num_seqs * sizes.state_bytes)
    if is_ours and setup.on_cpu and recipe.model.dtype == "float32":
        parts["packed weights"] = float(copies * sizes.linear * number)
    return parts if shares_weights and copies == 1 else weights | parts


def _learner_memory(setup: StepSetup) -> Parts:
    """Return the memory of a learner's rank, with the colocated teachers, one of them awake at a time."""
    recipe, train, sizes, ranks = setup.recipe, setup.recipe.train, setup.models.student, setup.ranks
    number = BYTES[recipe.model.dtype]
    weights = sizes.parameters * number / ranks
    trained = trained_bytes(recipe.model, sizes) / ranks
    kept = trained_bytes(recipe.model, sizes, in_float32=True) / ranks
    moments = 2 * kept * (EIGHT_BIT if train.optimizer == "adamw_8bit" else 1.0)
    masters = kept if kept > trained else 0.0
    parts = {"weights": weights, "gradients": trained, "Adam's moments": moments}
    if masters:
        parts["master weights"] = masters
    if recipe.model.lora is not None:
        parts["adapter"] = trained
    if len(recipe.teachers) > 1 and recipe.route.measure_every:
        parts["gradients of each teacher"] = len(recipe.teachers) * trained + kept  # and the weights before
    if "update_critic" in setup.plan:
        # Adapters of one process share their base.
        base = weights if recipe.model.lora is not None and ranks > 1 else 0.0
        state = 0.0 if train.offload != "none" else moments + masters  # the student's is there at other times
        parts["critic (all of it)"] = base + 2 * trained + state
    if "ref_logprobs" in setup.plan and not recipe.is_own_base:
        parts["reference"] = setup.models.reference.parameters * number / ranks
    if copies := _published_copies(setup):
        parts["published weights"] = copies * (trained if recipe.model.lora is not None else weights) * ranks
    if ranks > 1:
        # Layers are gathered one after the other, the next while one computes.
        layer = (sizes.parameters - sizes.vocabulary * sizes.hidden) / sizes.layers
        parts["gathered layers"] = number * (2 * layer + sizes.vocabulary * sizes.hidden)
    tokens = train.microbatch_tokens
    tokens = min(tokens, CPU_MICROBATCH_TOKENS) if setup.on_cpu else tokens
    activation = 3.0 if train.autocast == "bfloat16" else number
    parts["activations"] = tokens * activation * sizes.token_activations(train.gradient_checkpointing)
    parts["logits"] = _logits(tokens, sizes)
    if train.offload != "none":
        # There while the optimizer steps, when activations are gone: only what is larger than these counts.
        state = parts.pop("Adam's moments") + parts.pop("master weights", 0.0)
        parts["optimizer's state (offloaded)"] = max(0.0, state - parts["activations"] - parts["logits"])
    if teachers := _colocated_teachers(setup):
        asleep, limit = sum(teachers) - max(teachers), recipe.runtime.teachers_gb
        if not setup.on_cpu or limit is not None:
            asleep = min(asleep, (limit or 0.0) * GIB)
        parts["teachers"] = max(teachers) + asleep
    return parts


def _published_copies(setup: StepSetup) -> int:
    """Return how many copies of the weights the first rank keeps for engines, one per version in use."""
    recipe = setup.recipe
    if not recipe.on_ray:
        return recipe.rollout.lag + 1 if recipe.rollout.lag else 0
    by_object_store = setup.on_cpu or importlib.util.find_spec("nixl") is None
    return 0 if by_object_store else recipe.rollout.lag + 1


def _colocated_teachers(setup: StepSetup) -> list[float]:
    """Return the bytes of the colocated teachers. Those on one base share it, or it is the student's."""
    recipe = setup.recipe
    if "teachers" not in setup.plan:
        return []
    chosen = {name: t for name, t in recipe.teachers.items() if not t.scores_during_rollout}
    groups = base_groups(chosen)
    alone = [[name] for name in chosen if not any(name in group for group in groups)]
    bytes_of_each = []
    for names in (*groups, *alone):
        first = chosen[names[0]]
        on_student = first.adapter is not None and first.model is None
        is_lent = on_student and recipe.model.lora is not None and ENGINES[first.engine].shares_model
        dtype = recipe.model.dtype if first.model is None else first.dtype
        base = 0.0 if is_lent else float(setup.models.teachers[names[0]].parameters * BYTES[dtype])
        folders = [adapter_folder(adapter) for name in names if (adapter := chosen[name].adapter) is not None]
        adapters = sum(saved_parameters(folder) or 0 for folder in folders if folder is not None)
        bytes_of_each.append(base + BYTES["float32"] * adapters)
    return bytes_of_each


def _logits(tokens: int, sizes: Sizes) -> float:
    return 2.0 * BYTES["float32"] * min(CHUNK_LOGITS, tokens * sizes.vocabulary)


def _uses(setup: StepSetup) -> dict[str, Parts]:
    """Return what each role's actor holds. Reward models are not counted: their sizes are not known."""
    uses: dict[str, Parts] = {TRAIN: _learner_memory(setup)}
    spread = 1 if setup.on_cpu else setup.recipe.rollout.engine_devices  # a machine's cores share its memory
    engine = engine_memory(setup, shares_weights=not setup.recipe.on_ray)
    uses[ROLLOUT] = {what: size / spread for what, size in engine.items()}
    for path, model in setup.recipe.own_models.items():
        sizes = setup.models.teachers.get(path.removeprefix("teachers."))
        if sizes is not None:
            number, tokens = BYTES[model.dtype], model.batch_tokens
            uses[path] = {
                "weights": sizes.parameters * number / model.model_devices,
                "activations": float(tokens * (6 * sizes.hidden + 2 * sizes.inner) * number),
                "logits": _logits(tokens, sizes),
            }
    return uses


def _joined(uses: Sequence[Parts]) -> Parts:
    parts = Counter[str]()
    for use in uses:
        parts.update(use)  # pyright: ignore[reportArgumentType]  (adds floats as well as integers)
    return parts
