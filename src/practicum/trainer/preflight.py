"""Run the checks of `practicum check` that need files, a tokenizer, servers or a model.

`train` also runs `check_without_models`, so that both refuse the same recipes with the same messages.
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import sqrt

from practicum.engines.table import ENGINES
from practicum.engines.torch.model_runner import ModelRunner
from practicum.errors import MissingExtraError, PracticumError, RecipeError, RecipeErrors
from practicum.forecast.device_memory import GIB, model_sizes
from practicum.forecast.forecast import forecast, this_machine
from practicum.learning.packed_model import PackedModel
from practicum.models.load_model import (
    load_model,
    load_tokenizer,
    model_facts,
    replays_experts,
    require_known_layers,
    skeleton,
)
from practicum.models.lora import base_fingerprint, describe_adapter
from practicum.models.model_files import must_read, read_config
from practicum.models.state_layers import state_layers
from practicum.observe.trackers import require_trackers
from practicum.recipe.derived import Traits, model_traits, traits_of
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Model, Recipe, Train
from practicum.rewards.reward_scorer import check_reward_models, probe_reward_servers
from practicum.roles.learner_rank import load_reference
from practicum.roles.padding import check_fields
from practicum.roles.probe_teachers import probe_teachers
from practicum.roles.stage_table import make_plan
from practicum.runtime.ray.cluster import check_cluster
from practicum.sessions.attempts import find_loop
from practicum.sessions.tools.toolbox import Toolbox, require_sandbox
from practicum.tasks.stream import LeftOut
from practicum.teachers.check_routes import check_routes
from practicum.teachers.load_teachers import base_spec, probe_servers
from practicum.teachers.shared_tokens import shared_tokens
from practicum.teachers.teacher_checks import check_bases, check_teachers, longest_prompts
from practicum.trainer.check_data import check_data, hidden_tools, tokenizer_problems
from practicum.trainer.run_folder import choose_folder, folder_of, require_possible
from practicum.trainer.saver import crash_cost
from practicum.trainer.try_functions import check_parts, try_rewards

_FULL_LR, _FULL_WIDTH = 5e-5, 2048
"""A typical learning rate for full fine-tuning at this width. It scales with 1 / sqrt(width)."""
STRONGEST = 1.25
"""Largest exponent of a teacher in a product that worked in published runs."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Findings as messages, and the rows of files that the run skips."""

    findings: list[str]
    left_out: LeftOut
    longest: tuple[int, int]
    """Tokens of the longest prompt and answer."""
    warnings: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)


def preflight(loaded: LoadedRecipe) -> Preflight:
    """Return all findings of `check`. Raise RecipeErrors for mistakes."""
    recipe = loaded.recipe
    found = check_without_models(recipe)
    findings = [*try_rewards(recipe), *found.findings, crash_cost(recipe.checkpoint, recipe.train.steps)]
    require_possible(path := folder_of(recipe))
    try:
        choose_folder(path, resume=False, fresh=False)
    except PracticumError as error:
        findings.insert(0, f"run folder: {error}")
    for tool in Toolbox(recipe.agent.tools).tools:
        findings.append(f"tool: {tool.name}({', '.join(f'{p.name}: {p.kind}' for p in tool.parameters)})")
    model = load_model(recipe.model, recipe.seed)
    check_fields(make_plan(recipe, known_traits(recipe.model)), model)
    PackedModel(model, recipe.train)  # raises if the learner can't run it
    if ENGINES[recipe.rollout.engine].shares_model:
        ModelRunner(model)  # raises if the engine can't
    if recipe.model.lora is not None:
        findings.append(describe_adapter(model))
    check_bases(recipe.teachers, recipe.model, base_fingerprint(model))
    probed, doubts = probe_teachers(recipe, model)
    findings = [*probed, *findings]
    if (path := recipe.algorithm.kl.reference) is not None:
        load_reference(recipe.model, recipe.seed, path, model)
        findings.append(f"reference: {path} loads")
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    sessions, (prompt, answer) = recipe.counts.sessions, found.longest
    product = f"{sessions:,} × ({prompt:,} of prompt + {answer:,} of response)"
    sizes = [f"model: {type(model).__name__}, {millions:,.2f}M parameters, on {model.device}"]
    sizes.append(f"tokens: up to {product} = {sessions * (prompt + answer):,} per step")
    with suppress(RecipeError):  # a config whose sizes are not known
        for memory in () if recipe.on_ray else forecast(recipe, this_machine(), float(prompt)).memory:
            largest = max(memory.parts, key=lambda part: memory.parts[part])
            rest = f"most of it {largest}; `practicum plan` shows the rest"
            sizes.append(f"memory: about {memory.total / GIB:.2f} GiB, {rest}")
    return replace(found, findings=findings, warnings=[*doubts, *found.warnings], sizes=sizes)


def check_without_models(recipe: Recipe) -> Preflight:
    """Run all checks that need files, tokenizers, configs and servers, but no weights."""
    require_layers(recipe)
    require_extras(recipe)
    findings = check_parts(recipe)
    if recipe.on_ray:
        findings += check_cluster(recipe, make_plan(recipe, known_traits(recipe.model)))
    else:  # on Ray, programs run next to the engines
        require_sandbox(recipe.agent.tools)
    find_loop(recipe.agent.loop)
    tokenizer = load_tokenizer(recipe.model)
    template = "a chat template" if tokenizer.chat_template else "no chat template"
    ends = f"end {tokenizer.eos_token}, padding {tokenizer.pad_token}"
    findings.append(f"tokenizer: {len(tokenizer):,} tokens, {ends}, {template}")
    model_context, vocab = model_facts(recipe.model, len(tokenizer))
    context = recipe.rollout.context_for(model_context)
    if model_context is not None and context > model_context:
        expected = f"at most the model's context of {model_context}"
        raise RecipeErrors(f"recipe {recipe.name}", [RecipeError("rollout.context", f"{context}", expected)])
    data = check_data(recipe, tokenizer, context)
    findings += data.findings
    if problems := list(tokenizer_problems(recipe, tokenizer, vocab, uses_chat=data.uses_chat)):
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    longest = data.prompt, data.answer
    if recipe.agent.loop != "single_turn":  # later turns may fill the context
        longest = longest[0], max(longest[1], context - longest[0])
    if recipe.teachers:
        findings += check_routes(recipe)
        shared = shared_tokens(recipe, tokenizer)
        prompts = longest_prompts(recipe, tokenizer, shared, longest[0])
        findings += check_teachers(
            recipe,
            tokenizer,
            shared=shared,
            longest=prompts,
            longest_answer=longest[1],
            uses_chat=data.uses_chat,
            student_vocab=vocab,
            student_context=model_context,
        )
        needed = {name: tokens + longest[1] for name, tokens in prompts.items()}
        findings += probe_servers(recipe.teachers, recipe.distill, vocab or len(tokenizer), needed)
    if recipe.reward.models:
        findings += check_reward_models(recipe.reward.models, tokenizer, sum(longest))
        findings += probe_reward_servers(recipe.reward.models, chat=data.uses_chat)
    by_rewards_alone = recipe.uses_reward and recipe.distill is None
    replays = recipe.rollout.engine_traits.reports_experts
    warnings = _warnings(recipe.model, recipe.train, replays=replays, by_rewards_alone=by_rewards_alone)
    warnings += [
        f"the vocabulary of teacher {name} is not compared with the student's, and scores of other tokens "
        f"teach nonsense: set teachers.{name}.tokenizer to the folder or hub name of its tokenizer"
        for name, teacher in recipe.teachers.items()
        if teacher.url is not None and teacher.tokenizer is None
    ]
    warnings += [
        f"teachers.{name}.target has the exponent {max(teacher.target.values()):g}: above {STRONGEST:g} "
        "published runs became unstable (ExOPD, arXiv:2602.12125)"
        for name, teacher in recipe.teachers.items()
        if teacher.target and max(teacher.target.values()) > STRONGEST
    ]
    warnings += hidden_tools(recipe, tokenizer) if data.uses_chat else ()
    return Preflight(findings, data.left_out, longest, warnings)


def require_layers(recipe: Recipe) -> None:
    """Raise a RecipeError if learner or engines can't run the layers of their models."""
    if recipe.model.path is not None:
        require_known_layers(recipe.model.path, "model.path")
    models = {"rollout": (recipe.rollout.engine, recipe.model)}
    for name, teacher in recipe.teachers.items():
        if teacher.url is None:
            models[f"teachers.{name}"] = teacher.engine, base_spec(recipe.model, teacher)
    for path, (engine, spec) in models.items():
        if not (kind := ENGINES[engine]).recurrent:
            continue
        with must_read(spec.path or "", f"{path}.model", "a causal language model in HuggingFace format"):
            model = skeleton(spec)
        if (layers := state_layers(model)) and not kind.runs_recurrent(model.config):
            found = f"{engine} for {model.config.model_type} with recurrent layers ({layers})"
            raise RecipeError(f"{path}.engine", found, f"torch; {engine} runs {kind.recurrent}")


def require_extras(recipe: Recipe) -> None:
    """Raise a MissingExtraError if an optional package that the recipe needs is not installed."""
    runtime = recipe.runtime
    extras = [
        ("runtime.kind: ray", "ray", "ray", recipe.on_ray),
        ("runtime.store: transferqueue", "transfer_queue", "ray", runtime.store == "transferqueue"),
        ("model.lora", "peft", "lora", recipe.model.lora is not None),
        ("train.optimizer: adamw_8bit", "bitsandbytes", "8bit", recipe.train.optimizer == "adamw_8bit"),
        *((f"teachers.{n}.adapter", "peft", "lora", bool(t.adapter)) for n, t in recipe.teachers.items()),
    ]
    for what, module, extra, is_needed in extras:
        if is_needed and importlib.util.find_spec(module) is None:
            raise MissingExtraError(what, extra)
    engines = {"rollout": recipe.rollout.engine}
    engines |= {f"teachers.{name}": teacher.engine for name, teacher in recipe.teachers.items()}
    for path, name in engines.items():  # on Ray, the actors' machines need it
        if not recipe.on_ray and importlib.util.find_spec(ENGINES[name].module) is None:
            raise MissingExtraError(f"{path}.engine: {name}", name, ENGINES[name].install)
    require_trackers(recipe.track.to)


def known_traits(model: Model) -> Traits:
    """Return the student's traits from its config. `moe` means experts that can be replayed."""
    try:
        if model.path is None:
            return model_traits(model)
        traits = traits_of(read_config(model.path).to_dict())
        return replace(traits, moe=False) if traits.moe and not replays_experts(model) else traits
    except (OSError, ValueError):
        return model_traits(model)


def _warnings(model: Model, train: Train, *, replays: bool, by_rewards_alone: bool) -> list[str]:
    """Return warnings about valid settings that are usually mistakes."""
    warnings, width = [], _FULL_WIDTH
    if model.lora is not None and train.steps:
        with suppress(RecipeError):  # a config whose sizes are not known
            width = model_sizes(model).hidden
        if train.lr <= _FULL_LR * sqrt(_FULL_WIDTH / width):
            warnings.append(
                f"train.lr {train.lr:g} is typical for full fine-tuning at width {width}: with model.lora, "
                "ten times that is usual"
            )
    if model_traits(model).moe and not (replays and known_traits(model).moe):
        who = "the student's routers" if replays else "the engine's choices of experts"
        warnings.append(
            f"{who} can't be recorded and replayed: near a tie the learner may take other experts than the "
            "engine took"
        )
    if model.random_init is not None and by_rewards_alone:
        warnings.append(
            "the student has random weights (model.random_init) and trains on rewards alone, which a "
            "random model rarely earns. Train it by SFT first (algorithm.loss: supervised, "
            "algorithm.advantage: none) and set model.path to that run"
        )
    return warnings
