"""Memory of the cluster's devices, or of its machines where their cores are the devices."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from practicum.dataplane.stages import Plan
from practicum.engines.table import ENGINES
from practicum.forecast.model_sizes import BYTES, Models, Sizes, trained_bytes
from practicum.recipe.counts import CHUNK_LOGITS, CPU_MICROBATCH_TOKENS, KV_POSITIONS, KV_SPARE
from practicum.recipe.derived import adapter_folder, base_groups, saved_parameters
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.placement import ROLLOUT, TRAIN, ActorPlacement

GIB = 2**30
TIGHT = 0.9
"""Fraction of a device above which a forecast warns: allocators and libraries need some memory too."""
EIGHT_BIT = (1 + 4 / 256) / 4
"""Bytes of 8-bit moments, with a scale for each block of 256, as a fraction of float32's."""
Parts = Mapping[str, float]
"""Bytes by what they hold."""
_ADVICE = {
    "KV memory": "lower rollout.slots or rollout.context, or give engines their own devices (pools.rollout)",
    "activations": "lower train.microbatch_tokens, or set train.gradient_checkpointing",
    "published weights": "uninstall nixl, or lower rollout.lag",
    "teachers": "give teachers their own devices (placement: own)",
    "Adam's moments": "take train.optimizer adamw_8bit or train.offload, or raise pools.train.devices",
    "engine's weights": "give engines their own devices (pools.rollout), or split each over several "
    "(rollout.vllm.tensor_parallel)",
}


@dataclass(frozen=True)
class StepSetup:
    """A step as far as memory depends on it."""

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
    """What a device or machine holds, in bytes, and how much it has."""

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
    setup: StepSetup, limits: Sequence[float], layout: ActorPlacement | None
) -> tuple[DeviceMemory, ...]:
    """Return each device or machine that differs from the others; without a layout the first machine's.

    `limits` are the bytes of a device of each machine.
    """
    uses = _uses(setup)
    if layout is None:
        title = "a device of train" if setup.recipe.on_ray else "this process"
        return (DeviceMemory(title, _joined([uses[TRAIN], uses[ROLLOUT]]), limits[0]),)
    devices: dict[str, DeviceMemory] = {}
    for number, bundle in enumerate(layout.needs.bundles):
        roles = [a.role for a in layout.needs.actors if a.bundle == number and a.role in uses]
        if not roles:
            continue
        parts, place = _joined([uses[role] for role in roles]), layout.places[number]
        if setup.on_cpu:
            node = layout.nodes[place]
            before = devices[node.name].parts if node.name in devices else {}
            devices[node.name] = DeviceMemory(node.name, _joined([before, parts]), node.memory)
            continue
        title = f"a device of {bundle.pool} ({', '.join(dict.fromkeys(roles))})"
        device = DeviceMemory(title, parts, limits[place])
        if title not in devices or device.share > devices[title].share:
            devices[title] = device
    return tuple(devices.values())


def engine_memory(setup: StepSetup, *, shares_weights: bool) -> Parts:
    """Return the memory of the student's engines in a process, rollout.lag + 1 of them.

    Their weights (unless they are the learner's, as without a lag), those packed for decoding, and KV memory.
    """
    recipe, sizes = setup.recipe, setup.models.student
    number, copies = BYTES[recipe.model.dtype], recipe.sampling_engines
    tokens = _kv_tokens(setup)
    if recipe.agent.loop != "single_turn":
        tokens *= 2
    weights = {"engine's weights": float(copies * sizes.parameters * number)}
    parts = {"KV memory": float(copies * tokens * sizes.token_kv() * number)}
    is_ours = ENGINES[recipe.rollout.engine].shares_model
    if is_ours and setup.on_cpu and recipe.model.dtype == "float32":
        parts["packed weights"] = float(copies * sizes.linear * number)
    return parts if shares_weights and copies == 1 else weights | parts


def _kv_tokens(setup: StepSetup) -> float:
    """Return how many tokens KV memory has room for.

    The torch engine's grows with the sequences, of which only those of agents fill the whole context.
    """
    rollout = setup.recipe.rollout
    context = rollout.context_for(setup.models.student.context)
    if not ENGINES[rollout.engine].shares_model or setup.recipe.agent.loop != "single_turn":
        return rollout.slots * context
    used = min(rollout.slots, math.ceil(setup.rows / setup.replicas))
    grown = used * min(context, KV_SPARE * (setup.prompt_tokens + rollout.max_new_tokens))
    return max(grown, rollout.slots * min(context, KV_POSITIONS))


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
    """Return the bytes of the colocated teachers; those on one base share it, or it is the student's."""
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
