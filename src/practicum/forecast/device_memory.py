"""Bytes on each device and machine: who holds what, and what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from practicum.dataplane.plan import Plan
from practicum.forecast.model_sizes import BYTES, Sizes
from practicum.recipe.schema.recipe import Recipe

CHUNK_LOGITS = 2**25
"""Logits that the learner holds at once, as in learning/logprobs.py."""
CPU_MICROBATCH = 2048
"""Most tokens of a micro-batch on a CPU, as in learning/packed_model.py."""
CONTEXT_BESIDE_ANSWER = 1024
"""Tokens of prompt that rollout.context has room for if it is unset, as in runtime/local.py."""
TIGHT = 0.9
"""Share of a device above which a forecast warns: allocators and libraries need some too."""


@dataclass(frozen=True)
class MemoryUse:
    """What one actor holds on its device, by part in words."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def engine_use(recipe: Recipe, sizes: Sizes, *, shares_weights: bool) -> MemoryUse:
    """An engine of the student: its weights (unless they are the learner's own) and the KV memory."""
    number = BYTES[recipe.model.dtype]
    slots, context = recipe.rollout.slots, _context(recipe, sizes)
    kept = recipe.rollout.keep_tokens
    tokens = slots * context
    if recipe.agent.loop != "single_turn":
        tokens += slots * context if kept is None else kept
    parts = {} if shares_weights else {"engine's weights": float(sizes.parameters * number)}
    return MemoryUse(parts | {"KV memory": float(tokens * sizes.token_kv() * number)})


def learner_use(
    recipe: Recipe,
    plan: Plan,
    sizes: Sizes,
    reference: Sizes,
    teachers: Mapping[str, tuple[Sizes, str]],
    *,
    ranks: int,
    on_cpu: bool,
) -> MemoryUse:
    """A rank of the learner. `teachers` are the colocated ones, with their dtypes; one is awake at a time."""
    number, train = BYTES[recipe.model.dtype], recipe.train
    weights = sizes.parameters * number / ranks
    trained = {"weights": weights, "gradients": weights, "Adam's moments": 2 * weights}
    if "update_critic" in plan:
        trained["critic (all of it)"] = 4 * weights
    if "ref_logprobs" in plan:
        trained["reference"] = reference.parameters * number / ranks
    if ranks > 1:
        # Layers are gathered one after the other, the next while one computes.
        layer = (sizes.parameters - sizes.vocabulary * sizes.hidden) / sizes.layers
        trained["gathered layers"] = number * (2 * layer + sizes.vocabulary * sizes.hidden)
    tokens = min(train.microbatch_tokens, CPU_MICROBATCH) if on_cpu else train.microbatch_tokens
    kept = 3.0 if train.autocast == "bfloat16" else number
    trained["activations"] = tokens * kept * sizes.token_activations(train.gradient_checkpointing)
    trained["logits"] = 2.0 * BYTES["float32"] * min(CHUNK_LOGITS, tokens * sizes.vocabulary)
    if teachers:
        held = [one.parameters * BYTES[dtype] for one, dtype in teachers.values()]
        stay = recipe.runtime.teachers_gb
        asleep = sum(held) - max(held) if on_cpu and stay is None else (stay or 0.0) * 2**30
        trained["teachers"] = max(held) + min(asleep, sum(held) - max(held))
    return MemoryUse(trained)


def teacher_use(sizes: Sizes, dtype: str, batch_tokens: int, devices: int) -> MemoryUse:
    """A replica of a teacher with a device of its own, for each of its devices."""
    weights = sizes.parameters * BYTES[dtype] / devices
    scored = batch_tokens * (6 * sizes.hidden + 2 * sizes.inner) * BYTES[dtype]
    logits = 2.0 * BYTES["float32"] * min(CHUNK_LOGITS, batch_tokens * sizes.vocabulary)
    return MemoryUse({"weights": float(weights), "activations": float(scored), "logits": logits})


def _context(recipe: Recipe, sizes: Sizes) -> int:
    if recipe.rollout.context is not None:
        return recipe.rollout.context
    wanted = CONTEXT_BESIDE_ANSWER + recipe.rollout.max_new_tokens
    return wanted if sizes.context is None else min(wanted, sizes.context)
