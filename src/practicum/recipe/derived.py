"""What follows from a recipe's settings: how a step learns, where models run, what the model needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from practicum.recipe.algorithm_traits import loss_traits
from practicum.recipe.schema.teacher_sections import Own, OwnPlacement, Placement, RewardModel, Teacher

if TYPE_CHECKING:  # these sections ask this module when their keys are read
    from practicum.recipe.schema.recipe import MakeModel, Model, Recipe
    from practicum.recipe.schema.runtime_section import Pool


def is_supervised(recipe: Recipe) -> bool:
    """Whether the batch is demonstrations."""
    return recipe.algorithm.loss == "supervised"


def lag(recipe: Recipe) -> int:
    """How many steps older the weights that sample a batch are than those that it trains."""
    return getattr(recipe, "async").lag


def sampling_engines(recipe: Recipe) -> int:
    """Engines of a process that samples, each with weights of its own: one for each step under way.

    A vLLM engine is a process that takes their weights in turns.
    """
    return 1 if recipe.rollout.engine == "vllm" else lag(recipe) + 1


def sampling_s(recipe: Recipe) -> float:
    """Seconds in which a step is sampled at the latest: rollouts and rewards have deadlines of their own."""
    rounds = 1 + (recipe.buffer.max_refills if recipe.buffer.filter_flat_groups else 0)
    return 2 * rounds * recipe.rollout.deadline_s + 60.0


def uses_reward(recipe: Recipe) -> bool:
    """Whether something is learnt from rewards."""
    return not is_supervised(recipe) and recipe.reward.weight > 0


def computes_reward(recipe: Recipe) -> bool:
    """Whether training answers are judged at all."""
    return uses_reward(recipe) or (recipe.reward.watch and not is_supervised(recipe))


def distils_by_loss(recipe: Recipe) -> bool:
    """Whether a divergence from the teachers is back-propagated."""
    return recipe.distill is not None and recipe.distill.through == "loss"


def distils_by_policy(recipe: Recipe) -> bool:
    """Whether the teachers enter by each token's advantage or reward."""
    return recipe.distill is not None and recipe.distill.through != "loss"


def has_policy_loss(recipe: Recipe) -> bool:
    """Whether the update has a policy loss, and so advantages."""
    return not is_supervised(recipe) and (uses_reward(recipe) or distils_by_policy(recipe))


def has_advantage_estimator(recipe: Recipe) -> bool:
    """Whether algorithm.advantage is asked."""
    through_reward = recipe.distill is not None and recipe.distill.through == "reward"
    return not is_supervised(recipe) and (uses_reward(recipe) or through_reward)


def recorded_groups(recipe: Recipe) -> int | None:
    """Groups of a step that are kept in the run's record; None: all."""
    record = recipe.track.record
    if isinstance(record, int):
        return record
    return None if record == "all" else 0


def corrects_mismatch(recipe: Recipe) -> bool:
    """Whether the policy loss is weighed by the ratio of the learner to the engine."""
    mismatch = recipe.algorithm.mismatch
    return mismatch.weights != "off" or mismatch.reject is not None


def uses_old_logprobs(recipe: Recipe) -> bool:
    """Whether something is compared with the policy before the update."""
    if not has_policy_loss(recipe):
        return False
    in_reward = recipe.algorithm.kl.place == "reward" or distils_by_policy(recipe)
    return loss_traits(recipe.algorithm.loss).ratio or in_reward or corrects_mismatch(recipe)


def cuts_sampling(recipe: Recipe) -> bool:
    """Whether rollouts are not from the student's whole distribution."""
    rollout = recipe.rollout
    return rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0


def is_own_base(recipe: Recipe) -> bool:
    """Whether the reference policy is the student without its adapter."""
    return recipe.model.lora is not None and recipe.algorithm.kl.reference is None


def compare_temperature(recipe: Recipe) -> float:
    """Temperature at which student and teachers are compared."""
    chosen = recipe.distill.temperature if recipe.distill is not None else None
    return recipe.rollout.temperature if chosen is None else chosen


def has_own_process(placement: Placement) -> bool:
    """Whether a placement means processes of its own."""
    return placement != "colocated"


def own_options(model: Teacher | RewardModel) -> Own:
    """Options of the placement `own`."""
    return model.placement.own if isinstance(model.placement, OwnPlacement) else Own()


def scores_during_rollout(model: Teacher | RewardModel) -> bool:
    """Whether rows are scored while others still roll out."""
    return model.url is not None or has_own_process(model.placement)


def waits_for_models(recipe: Recipe) -> bool:
    """Whether rewards wait for colocated models, which work while the student's engines sleep."""
    return any(not scores_during_rollout(model) for model in recipe.reward.models.values())


def rollout_context(recipe: Recipe, model_context: int | None) -> int:
    """Tokens of KV memory for one sequence: the recipe's, else 1,024 of prompt and the answer."""
    if recipe.rollout.context is not None:
        return recipe.rollout.context
    needed = 1024 + recipe.rollout.max_new_tokens
    return needed if model_context is None else min(needed, model_context)


def session_deadline(recipe: Recipe) -> float:
    """Seconds one session may take: a loop that hangs fails before all sessions are late."""
    chosen = recipe.agent.deadline_s
    return 0.9 * recipe.rollout.deadline_s if chosen is None else chosen


def evaluates(recipe: Recipe) -> bool:
    """Whether evaluations have answers to judge."""
    return bool(recipe.eval.greedy or recipe.eval.samples)


def measured_scores(recipe: Recipe) -> list[str]:
    """The scores that an evaluation gives; each also by domain, after a slash."""
    samples = recipe.eval.samples
    sampled = [f"eval/mean@{samples}", f"eval/pass@{samples}"] if samples else []
    return [*(["eval/greedy"] if recipe.eval.greedy else []), *sampled]


def teacher_numbers(recipe: Recipe) -> dict[str, int]:
    """Each teacher's number, in the recipe's order."""
    return {name: number for number, name in enumerate(recipe.teachers)}


def on_ray(recipe: Recipe) -> bool:
    """Whether the roles are actors of a Ray cluster."""
    return recipe.runtime.kind == "ray"


def data_parallel(recipe: Recipe) -> int:
    """Ranks of the learner: one on each device of the pool train; one in this process."""
    return _devices(recipe.pools.train) if on_ray(recipe) else 1


def engine_replicas(recipe: Recipe) -> int:
    """Engines of the student."""
    if not on_ray(recipe):
        return 1
    devices = _devices(recipe.pools.rollout or recipe.pools.train)
    return recipe.rollout.replicas or max(1, devices // engine_devices(recipe))


def engine_devices(recipe: Recipe) -> int:
    """Devices that one engine of the student is on."""
    return recipe.rollout.vllm.tensor_parallel if recipe.rollout.engine == "vllm" else 1


def model_devices(model: Teacher | RewardModel) -> int:
    """Devices that one process, or one vLLM engine, of a model with its own processes is on."""
    if isinstance(model, Teacher) and model.engine == "vllm":
        return model.vllm.tensor_parallel
    return own_options(model).devices


def own_models(recipe: Recipe) -> dict[str, Teacher | RewardModel]:
    """Teachers and reward models with processes of their own, by their path in the recipe."""
    models: dict[str, Teacher | RewardModel] = {f"teachers.{n}": t for n, t in recipe.teachers.items()}
    models |= {f"reward.models.{n}": m for n, m in recipe.reward.models.items()}
    return {path: m for path, m in models.items() if m.url is None and has_own_process(m.placement)}


def base_groups(teachers: Mapping[str, Teacher]) -> list[list[str]]:
    """The teachers that share a base: adapters, and whole models that adapters are on.

    The torch engine's are those of this process. Those of vLLM share an engine's process too, if its settings
    are the same.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, teacher in teachers.items():
        is_apart, by_vllm = has_own_process(teacher.placement), teacher.engine == "vllm"
        if teacher.url is None and teacher.student is None and (by_vllm or not is_apart):
            base = (teacher.model, teacher.dtype, teacher.device) if teacher.model is not None else ()
            own = own_options(teacher).model_dump_json() if is_apart else ""
            settings = (own, teacher.vllm.model_dump_json()) if by_vllm else ()
            groups.setdefault((teacher.engine, *base, *settings), []).append(name)
    return [names for names in groups.values() if any(teachers[name].adapter for name in names)]


ADAPTER_CONFIG, EXPORTED = "adapter_config.json", "adapter"
"""A file that every adapter in PEFT's format has, and the folder of an export with the adapter alone: beside
config.json, transformers would load both."""


def adapter_folder(named: str) -> Path | None:
    """The folder with an adapter that a path means: itself, or one in an export; None if there is none."""
    folder = Path(named).expanduser()
    return next((f for f in (folder, folder / EXPORTED) if (f / ADAPTER_CONFIG).is_file()), None)


def _devices(pool: Pool) -> int:
    return pool.nodes * pool.devices


VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Models whose pictures practicum knows how to show; others of their kind are text models here."""


@dataclass(frozen=True, slots=True)
class Traits:
    """`moe`: tokens take experts, which are recorded. `vision`: rows may have pictures and positions of
    several axes."""

    moe: bool = False
    vision: bool = False


def traits_of(config: Mapping[str, Any]) -> Traits:
    """The traits of a model by its config.json."""
    text = config.get("text_config") or config
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    return Traits(moe=experts > 1, vision=config.get("model_type") in VISION_FAMILIES)


def model_traits(model: Model) -> Traits:
    """The traits of the student: made ones by their family, a folder's by its config; plain if unknown."""
    if model.make is not None:
        family = model.make.family
        return Traits(moe=family == "qwen3_moe", vision=family in VISION_FAMILIES)
    return traits_of(folder_config(model.path))


def folder_config(path: str | None) -> dict[str, Any]:
    """The config of a model's folder; nothing for a hub name or a missing folder, of which checks speak."""
    try:
        config = json.loads((Path(path or "").expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def saved_parameters(folder: Path) -> int | None:
    """Parameters in a folder's safetensors files, by their headers; None if there are none."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None


def made_sizes(make: MakeModel) -> dict[str, Any]:
    """The sizes of a made model by the names of its family's config; of one that sees, those for text."""
    if make.family == "gpt2":
        heads = {"n_embd": make.hidden, "n_layer": make.layers, "n_head": make.heads}
        return heads | {"n_positions": make.context}
    sizes: dict[str, Any] = {
        "hidden_size": make.hidden,
        "intermediate_size": 3 * make.hidden,
        "num_hidden_layers": make.layers,
        "num_attention_heads": make.heads,
        "num_key_value_heads": make.kv_heads,
        "max_position_embeddings": make.context,
    }
    if make.family != "qwen2_5_vl":
        sizes["head_dim"] = make.head_dim
    if make.family == "qwen3_moe":
        sizes |= {"num_experts": make.experts, "num_experts_per_tok": make.experts_per_token}
        # As much work for a token as in a dense model of this width.
        sizes["moe_intermediate_size"] = max(1, 3 * make.hidden // make.experts_per_token)
    return sizes
