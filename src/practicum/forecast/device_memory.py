"""Memory of the cluster's devices, or of its machines where their cores are the devices."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from practicum.forecast.cluster_spec import GIB, Machine
from practicum.forecast.model_sizes import BYTES, Sizes, trained_bytes
from practicum.forecast.step_setup import StepSetup
from practicum.recipe.counts import CHUNK_LOGITS, CPU_MICROBATCH_TOKENS, KV_POSITIONS, KV_SPARE
from practicum.recipe.derived import (
    adapter_folder,
    base_groups,
    engine_devices,
    is_own_base,
    lag,
    model_devices,
    own_models,
    rollout_context,
    sampling_engines,
    saved_parameters,
    scores_during_rollout,
)
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.runtime.ray.needs import ROLLOUT, TRAIN
from practicum.runtime.ray.placement import ActorPlacement

TIGHT = 0.9
"""Fraction of a device above which a forecast warns: allocators and libraries need some memory too."""
EIGHT_BIT = (1 + 4 / 256) / 4
"""Bytes of 8-bit moments, with a scale for each block of 256, as a fraction of float32's."""
Parts = Mapping[str, float]
"""Bytes by what they hold."""
_ADVICE = {
    "KV memory": "lower rollout.slots or rollout.context, or give engines their own devices (pools.rollout)",
    "activations": "lower train.microbatch_tokens, or set train.gradient_checkpointing",
    "published weights": "set runtime.weight_transport: object_store, or lower async.lag",
    "teachers": "give teachers their own devices (placement: own)",
    "Adam's moments": "take train.optimizer adamw_8bit or train.offload, or raise pools.train.devices",
    "engine's weights": "give engines their own devices (pools.rollout), or split each over several "
    "(rollout.vllm.tensor_parallel)",
}


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
        """That it is too small, and what to do."""
        name, size = max(self.parts.items(), key=lambda part: part[1])
        return (
            f"{self.title} has {self.limit / GIB:.1f} GiB and would need {self.total / GIB:.1f}: most of "
            f"it is {name} ({size / GIB:.1f} GiB)\n"
            f"  → {_ADVICE.get(name, 'raise pools.train.devices, or take model.dtype bfloat16')}"
        )


def device_memory(
    setup: StepSetup, machines: Sequence[Machine], layout: ActorPlacement | None
) -> tuple[DeviceMemory, ...]:
    """Each device or machine that differs from the others; without a layout only the first machine's."""
    uses = _uses(setup)
    if layout is None:
        own = None if setup.on_cpu else machines[0].device.memory_gb
        title = "a device of train" if setup.on_ray else "this process"
        limit = GIB * (own or machines[0].memory_gb)
        return (DeviceMemory(title, _joined([uses[TRAIN], uses[ROLLOUT]]), limit),)
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
        limit = GIB * (machines[place].device.memory_gb or machines[place].memory_gb)
        device = DeviceMemory(title, parts, limit)
        if title not in devices or device.share > devices[title].share:
            devices[title] = device
    return tuple(devices.values())


def engine_memory(setup: StepSetup, *, shares_weights: bool) -> Parts:
    """The student's engines of a process, one and one more for each step of async.lag: their weights (unless
    they are the learner's own, which they are without a lag), those that are packed for decoding
    (models/linears.py), and their KV memory."""
    recipe, sizes = setup.recipe, setup.models.student
    number, copies = BYTES[recipe.model.dtype], sampling_engines(recipe)
    tokens = _kv_tokens(setup)
    if recipe.agent.loop != "single_turn":
        tokens += tokens if recipe.rollout.keep_tokens is None else recipe.rollout.keep_tokens
    weights = {"engine's weights": float(copies * sizes.parameters * number)}
    parts = {"KV memory": float(copies * tokens * sizes.token_kv() * number)}
    is_packed = setup.on_cpu and recipe.rollout.engine == "torch" and recipe.model.dtype == "float32"
    if is_packed and sizes.gated and not sizes.experts:
        parts["packed weights"] = float(copies * sizes.parameters * number)
    return parts if shares_weights and copies == 1 else weights | parts


def _kv_tokens(setup: StepSetup) -> float:
    """Tokens that KV memory has room for. The torch engine's grows with the sequences, of which only those of
    agents are taken to fill the whole context."""
    rollout, work = setup.recipe.rollout, setup.work
    context = rollout_context(setup.recipe, setup.models.student.context)
    if rollout.engine != "torch" or setup.recipe.agent.loop != "single_turn":
        return rollout.slots * context
    used = min(rollout.slots, math.ceil(work.rows / setup.replicas))
    grown = used * min(context, KV_SPARE * (work.prompt_tokens + work.longest))
    return max(grown, rollout.slots * min(context, KV_POSITIONS))


def _learner_memory(setup: StepSetup) -> Parts:
    """A rank of the learner, with the colocated teachers, one of which is awake at a time."""
    recipe, train, sizes, ranks = setup.recipe, setup.recipe.train, setup.models.student, setup.ranks
    number = BYTES[recipe.model.dtype]
    weights = sizes.parameters * number / ranks
    trained = trained_bytes(recipe, sizes) / ranks
    kept = trained_bytes(recipe, sizes, in_float32=True) / ranks
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
    if "ref_logprobs" in setup.plan and not is_own_base(recipe):
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
    """Copies of the student's weights that the first rank keeps for engines, one for each version in use."""
    recipe = setup.recipe
    if not setup.on_ray:
        return lag(recipe) + 1 if lag(recipe) else 0
    transport = recipe.runtime.weight_transport
    if transport == "auto" and (setup.on_cpu or importlib.util.find_spec("nixl") is None):
        transport = "object_store"
    return 0 if transport == "object_store" else lag(recipe) + 1


def _colocated_teachers(setup: StepSetup) -> list[float]:
    """Bytes of the colocated teachers; those on one base have it together, or it is the student's."""
    recipe = setup.recipe
    chosen = {
        n: t for n, t in recipe.teachers.items() if n in setup.teachers and not scores_during_rollout(t)
    }
    groups = base_groups(chosen)
    alone = [[name] for name in chosen if not any(name in group for group in groups)]
    bytes_of_each = []
    for names in (*groups, *alone):
        first = chosen[names[0]]
        on_student = first.adapter is not None and first.model is None
        is_lent = on_student and recipe.model.lora is not None and first.engine == "torch"
        dtype = recipe.model.dtype if first.model is None else first.dtype
        base = 0.0 if is_lent else float(setup.teachers[names[0]].parameters * BYTES[dtype])
        bytes_of_each.append(base + sum(_adapter_bytes(chosen[name]) for name in names))
    return bytes_of_each


def _adapter_bytes(teacher: Teacher) -> int:
    """Bytes of a teacher's adapter by its files; 0 if it has none, or if it is not there yet."""
    folder = None if teacher.adapter is None else adapter_folder(teacher.adapter)
    return 0 if folder is None else BYTES["float32"] * (saved_parameters(folder) or 0)


def _teacher_memory(sizes: Sizes, dtype: str, batch_tokens: int, devices: int) -> Parts:
    """One device of a teacher's own process."""
    weights = sizes.parameters * BYTES[dtype] / devices
    activations = batch_tokens * (6 * sizes.hidden + 2 * sizes.inner) * BYTES[dtype]
    return {"weights": weights, "activations": float(activations), "logits": _logits(batch_tokens, sizes)}


def _logits(tokens: int, sizes: Sizes) -> float:
    return 2.0 * BYTES["float32"] * min(CHUNK_LOGITS, tokens * sizes.vocabulary)


def _uses(setup: StepSetup) -> dict[str, Parts]:
    """What each role's actor holds. Reward models are not counted: their sizes are not known."""
    uses: dict[str, Parts] = {TRAIN: _learner_memory(setup)}
    spread = 1 if setup.on_cpu else engine_devices(setup.recipe)  # a machine's cores share its memory
    engine = engine_memory(setup, shares_weights=not setup.on_ray)
    uses[ROLLOUT] = {what: size / spread for what, size in engine.items()}
    for path, model in own_models(setup.recipe).items():
        sizes = setup.models.teachers.get(path.removeprefix("teachers."))
        if sizes is not None:
            devices = model_devices(model)
            uses[path] = _teacher_memory(sizes, model.dtype, model.batch_tokens, devices)
    return uses


def _joined(uses: Sequence[Parts]) -> Parts:
    parts = Counter[str]()
    for use in uses:
        parts.update(use)  # pyright: ignore[reportArgumentType]  (adds floats as well as integers)
    return parts
