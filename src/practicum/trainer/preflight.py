"""What can be known before any work but needs files, a tokenizer or a model: `practicum check`.

`train` runs `check_without_models` too, so that both refuse the same recipes with the same sentences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt

from practicum.errors import MissingExtraError, RecipeError, RecipeErrors
from practicum.forecast.cluster_spec import GIB, this_machine
from practicum.forecast.forecast import forecast
from practicum.forecast.model_sizes import model_sizes
from practicum.learning.packed_model import PackedModel
from practicum.models.load_model import load_model, load_tokenizer, model_facts
from practicum.models.lora import base_fingerprint, describe_adapter, needless_rank
from practicum.models.model_files import read_config
from practicum.observe.trackers import require_trackers
from practicum.recipe.counts import count
from practicum.recipe.derived import (
    Traits,
    measured_scores,
    model_traits,
    on_ray,
    rollout_context,
    traits_of,
    uses_reward,
)
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.rewards.check_reward_models import check_reward_models
from practicum.roles.load_teachers import probe_servers
from practicum.roles.padding import check_fields
from practicum.roles.reward_models import probe_reward_servers
from practicum.roles.stage_table import make_plan
from practicum.roles.train_rank import load_reference
from practicum.runtime.ray.cluster import check_cluster
from practicum.sessions.attempts import find_loop
from practicum.sessions.tools.toolbox import isolation_warnings, require_isolation
from practicum.tasks.builtin import find_kind
from practicum.tasks.check_tasks import check_tasks
from practicum.tasks.locations import eval_location, open_rows, train_location
from practicum.tasks.mixture import share_places
from practicum.tasks.stream import eval_prompts, used_rows
from practicum.teachers.check_routes import check_routes
from practicum.teachers.teacher_checks import check_bases, check_teachers, longest_prompts
from practicum.trainer.check_parts import check_parts
from practicum.trainer.check_tokenizer import describe_tokenizer, tokenizer_problems
from practicum.trainer.measure_prompts import measure_prompts
from practicum.trainer.run_folder import folder_of, require_possible
from practicum.trainer.saver import crash_cost
from practicum.trainer.trial import describe_tools, try_rewards

_FULL_LR, _FULL_WIDTH = 5e-5, 2048
"""A usual learning rate of all weights at this width; narrower models take more, as the root of the width."""
LeftOut = Mapping[str, frozenset[int]]
"""Rows of files that a run leaves out, by path."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found, in sentences, and the rows of files that the run leaves out."""

    findings: list[str]
    left_out: LeftOut
    longest: tuple[int, int]
    """Tokens of the longest prompt and answer."""
    warnings: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)


def preflight(loaded: LoadedRecipe) -> Preflight:
    """All that `check` finds; mistakes are RecipeErrors."""
    recipe = loaded.recipe
    found = check_without_models(recipe)
    findings = [*_folder(recipe), crash_cost(recipe.checkpoint, recipe.train.steps), *found.findings]
    findings += [*try_rewards(recipe), *describe_tools(recipe)]
    model = load_model(recipe.model, recipe.seed)
    plan = make_plan(recipe, known_traits(recipe.model))
    check_fields(plan, model)
    PackedModel(model, recipe.train)  # tests whether the learner can run it
    warnings = list(found.warnings)
    if recipe.model.lora is not None:
        findings.append(describe_adapter(model))
        warnings += filter(None, [needless_rank(model)])
    check_bases(recipe, base_fingerprint(model))
    if recipe.algorithm.kl.reference is not None:
        load_reference(recipe, model)
        findings.append(f"reference: {recipe.algorithm.kl.reference} loads")
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    about = f"model: {type(model).__name__}, {millions:,.2f}M parameters, on {model.device}"
    return replace(found, findings=findings, warnings=warnings, sizes=[about, *_sizes(recipe, found)])


def check_without_models(recipe: Recipe) -> Preflight:
    """All that files, tokenizers, configs and servers tell, before any weights are loaded."""
    require_extras(recipe)
    findings = [*check_tasks(recipe), *check_parts(recipe)]
    if on_ray(recipe):
        findings += check_cluster(recipe)
    else:  # there, programs run where the engines are
        require_isolation(recipe.agent.tools)
    find_loop(recipe.agent.loop)
    tokenizer = load_tokenizer(recipe.model)
    findings.append(describe_tokenizer(tokenizer))
    model_context, vocab = model_facts(recipe.model, len(tokenizer))
    context = rollout_context(recipe, model_context)
    uses_chat = _uses_chat(recipe)
    problems = [*_context_problems(context, model_context)]
    problems += tokenizer_problems(recipe, tokenizer, vocab, uses_chat=uses_chat)
    _raise(recipe, problems)
    lengths = measure_prompts(recipe, tokenizer, context)
    findings += lengths.findings(context)
    _raise(recipe, [*_row_problems(recipe, lengths.left_out), *_eval_problems(recipe, lengths.left_out)])
    longest = lengths.prompt, lengths.answer
    if recipe.agent.loop != "single_turn":  # later turns may fill the context
        longest = longest[0], max(longest[1], context - longest[0])
    if recipe.teachers:
        findings += check_routes(recipe)
        prompts = longest_prompts(recipe, tokenizer, longest[0])
        findings += check_teachers(
            recipe,
            tokenizer,
            longest=prompts,
            longest_answer=longest[1],
            uses_chat=uses_chat,
            student_vocab=vocab,
            student_context=model_context,
        )
        needed = {name: tokens + longest[1] for name, tokens in prompts.items()}
        findings += probe_servers(recipe, vocab or len(tokenizer), needed)
    if recipe.reward.models:
        findings += check_reward_models(recipe, tokenizer, sum(longest))
        findings += probe_reward_servers(recipe, chat=uses_chat)
    return Preflight(findings, lengths.left_out, longest, _warnings(recipe))


def require_extras(recipe: Recipe) -> None:
    """The optional packages that the recipe needs are installed, or a MissingExtraError names the extra."""
    extras: list[tuple[str, str, str]] = []
    if on_ray(recipe):  # vLLM must be where its actors are, which may not be here
        extras.append(("runtime.kind: ray", "ray", "ray"))
        if recipe.runtime.store.kind == "transferqueue":
            extras.append(("runtime.store.kind: transferqueue", "transfer_queue", "ray"))
        if recipe.runtime.weight_transport == "nixl":
            extras.append(("runtime.weight_transport: nixl", "nixl", "nixl"))
    else:
        engines = {f"teachers.{name}": teacher.engine for name, teacher in recipe.teachers.items()}
        engines |= {"rollout": recipe.rollout.engine}
        extras += [(f"{path}.engine: vllm", "vllm", "vllm") for path, e in engines.items() if e == "vllm"]
    if recipe.model.lora is not None:
        extras.append(("model.lora", "peft", "lora"))
    if recipe.train.optimizer == "adamw_8bit":
        extras.append(("train.optimizer: adamw_8bit", "bitsandbytes", "8bit"))
    adapted = [name for name, teacher in recipe.teachers.items() if teacher.adapter is not None]
    extras += [(f"teachers.{name}.adapter", "peft", "lora") for name in adapted[:1]]
    for what, module, extra in extras:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(what, extra)
    require_trackers(recipe)


def known_traits(model: Model) -> Traits:
    """The student's traits by its config, wherever that is; what is wrong with it other checks say."""
    if model.path is None:
        return model_traits(model)
    try:
        return traits_of(read_config(model.path).to_dict())
    except (OSError, ValueError):
        return model_traits(model)


def _raise(recipe: Recipe, problems: list[RecipeError]) -> None:
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)


def _uses_chat(recipe: Recipe) -> bool:
    """Whether some prompt goes through the chat template."""
    tasks = recipe.tasks
    if any(task.chat or (task.kind is not None and find_kind(task.kind).pictures) for task in tasks.values()):
        return True
    return any(
        open_rows(name, task, at).has_messages
        for name, task in tasks.items()
        for at in (train_location(task), eval_location(task))
        if at is not None
    )


def _context_problems(context: int, model_context: int | None) -> Iterator[RecipeError]:
    if model_context is not None and context > model_context:
        found, expected = f"{context}", f"at most the model's context of {model_context}"
        yield RecipeError("rollout.context", found, expected)


def _row_problems(recipe: Recipe, left_out: LeftOut) -> Iterator[RecipeError]:
    """A step's prompts are different ones: each task has a row for each of its prompts."""
    places = share_places([task.weight for task in recipe.tasks.values()])
    for (name, task), share in zip(recipe.tasks.items(), places, strict=True):
        at, prompts = train_location(task), recipe.train.prompts * share // sum(places)
        if at is None or not recipe.train.steps:
            continue
        rows = len(used_rows(open_rows(name, task, at, at_least=prompts), left_out))
        if rows < prompts:
            found = f"{rows} rows of {at} for {prompts} prompts of a step"
            advice = "a step would train on the same row several times: lower train.prompts, or add rows"
            yield RecipeError(f"tasks.{name}", found, f"at least {prompts} rows", advice)


def _eval_problems(recipe: Recipe, left_out: LeftOut) -> Iterator[RecipeError]:
    """Evaluations during training have prompts, and give the metric that the best checkpoint is chosen by."""
    best = recipe.checkpoint.keep_best
    if not recipe.eval.every:
        return
    prompts = eval_prompts(recipe.tasks, recipe.eval.rows, recipe.seed, left_out)
    if not prompts:
        found = f"{recipe.eval.every} and no evaluation rows: no task is built-in or holds out rows"
        name, task = next(iter(recipe.tasks.items()))
        key = "eval_file" if task.dataset is None else "eval_split"
        advice = f"set tasks.{name}.{key} to rows that are held out, or eval.every to 0"
        yield RecipeError("eval.every", found, "rows to evaluate on", advice)
        return
    domains = sorted({prompt.domain for prompt in prompts})
    scores = measured_scores(recipe)
    known = [*scores, *(f"{score}/{domain}" for score in scores for domain in domains)]
    if best not in (None, "auto", *known):
        advice = f"evaluations give {', '.join(known)}"
        yield RecipeError("checkpoint.keep_best", repr(best), "a metric that is measured", advice)


def _warnings(recipe: Recipe) -> list[str]:
    """What may be meant, and is more often a mistake."""
    warnings = [*isolation_warnings(recipe.agent.tools), *_slow_adapter(recipe)]
    if recipe.model.make is None or not uses_reward(recipe) or recipe.distill is not None:
        return warnings
    return [
        *warnings,
        "the student starts with random weights (model.make) and learns from rewards alone: answers that "
        "earn nothing teach nothing. Train it on demonstrations first (algorithm.loss: supervised, "
        "algorithm.advantage: none) and set model.path to that run",
    ]


def _slow_adapter(recipe: Recipe) -> list[str]:
    """An adapter with a learning rate that is usual for whole models of this width."""
    if recipe.model.lora is None or not recipe.train.steps:
        return []
    try:
        width = model_sizes(recipe.model.path, recipe.model.make).hidden
    except RecipeError:  # a config whose sizes are not known
        return []
    usual = _FULL_LR * sqrt(_FULL_WIDTH / width)
    if recipe.train.lr > usual:
        return []
    return [
        f"train.lr {recipe.train.lr:g} looks like one for all weights of a model of width {width}: "
        "with model.lora, ten times that rate is usual"
    ]


def _folder(recipe: Recipe) -> list[str]:
    """What `train` will want to be told, unless it writes elsewhere."""
    folder = folder_of(recipe)
    require_possible(folder.path)
    if folder.is_used:
        return [f"run folder: {folder.path} holds a run already: train needs --resume, --fresh or --out DIR"]
    if folder.is_foreign:
        return [f"run folder: {folder.path} has files that are not a run's: train needs --out DIR"]
    return []


def _sizes(recipe: Recipe, found: Preflight) -> list[str]:
    """Tokens of a step at most, and memory as `practicum plan` counts it."""
    sessions, (prompt, answer) = count(recipe).sessions, found.longest
    product = f"{sessions:,} × ({prompt:,} of prompt + {answer:,} of answer)"
    lines = [f"tokens: up to {product} = {sessions * (prompt + answer):,} per step"]
    if on_ray(recipe):
        return lines
    try:
        (memory,) = forecast(recipe, this_machine(), lambda _: float(prompt)).memory
    except RecipeError:  # a config whose sizes are not known
        return lines
    largest = max(memory.parts, key=lambda part: memory.parts[part])
    summary = f"about {memory.total / GIB:.2f} GiB, most of it {largest}; `practicum plan` shows the rest"
    return [*lines, f"memory: {summary}"]
