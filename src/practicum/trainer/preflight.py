"""What can be known before any work but needs files, a tokenizer or a model: `practicum check`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from practicum.errors import MissingExtraError, RecipeError, RecipeErrors
from practicum.models.load_model import load_model, load_tokenizer, model_facts, stop_ids
from practicum.models.model_files import read_config
from practicum.recipe.derived import Traits, model_traits, on_ray, rollout_context, traits_of
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.rewards.check_reward_models import check_reward_models
from practicum.roles.load_teachers import probe_servers
from practicum.roles.reward_models import probe_reward_servers
from practicum.roles.train_rank import load_reference
from practicum.runtime.ray.cluster import check_cluster
from practicum.sessions.loops import find_loop
from practicum.tasks.builtin import TASKS
from practicum.tasks.check_tasks import check_tasks
from practicum.tasks.locations import eval_location, open_rows, train_location
from practicum.teachers.check_routes import check_routes
from practicum.teachers.teacher_checks import check_teachers, longest_prompts
from practicum.trainer.measure_prompts import measure_prompts
from practicum.trainer.saver import crash_cost
from practicum.trainer.trial import describe_tools, try_rewards


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found, in sentences, and the rows of files that the run leaves out."""

    findings: list[str]
    left_out: Mapping[str, frozenset[int]]


def preflight(loaded: LoadedRecipe) -> list[str]:
    """Findings in sentences; mistakes are RecipeErrors."""
    recipe = loaded.recipe
    findings = check_without_models(recipe).findings
    findings += [*try_rewards(recipe), *describe_tools(recipe)]
    model = load_model(recipe.model, recipe.seed)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    findings.append(f"model: {type(model).__name__}, {millions:.2f}M parameters, on {model.device}")
    findings.append(crash_cost(recipe.checkpoint, recipe.train.steps))
    stop_ids(model, load_tokenizer(recipe.model), recipe.rollout.stop)
    if recipe.algorithm.kl.reference is not None:
        load_reference(recipe, model)
        findings.append(f"reference: {recipe.algorithm.kl.reference} loads")
    return findings


def require_engines(recipe: Recipe) -> None:
    """vLLM is installed here, if something is to be computed by it."""
    wanted = {f"teachers.{name}": teacher.engine for name, teacher in recipe.teachers.items()}
    wanted |= {"rollout": recipe.rollout.engine}
    for path, engine in wanted.items():
        if engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise MissingExtraError(f"{path}.engine: vllm", "vllm")


def check_without_models(recipe: Recipe) -> Preflight:
    """All that files, tokenizers, configs and servers tell, before any weights are loaded."""
    findings = check_tasks(recipe)
    if on_ray(recipe):
        findings += check_cluster(recipe)
    else:
        require_engines(recipe)
    find_loop(recipe.agent.loop)
    tokenizer = load_tokenizer(recipe.model)
    findings.append(_describe_tokenizer(tokenizer))
    _check_agent_texts(recipe, tokenizer)
    model_context, vocab = model_facts(recipe.model, len(tokenizer))
    context = rollout_context(recipe, model_context)
    _check_context(recipe, context, model_context)
    lengths = measure_prompts(recipe, tokenizer, context)
    findings += lengths.findings(context)
    longest = lengths.prompt, lengths.answer
    if recipe.agent.loop != "single_turn":  # later turns may fill the context
        longest = longest[0], max(longest[1], context - longest[0])
    if recipe.teachers:
        findings += check_routes(recipe)
        findings += check_teachers(
            recipe,
            tokenizer,
            longest_prompt=longest[0],
            longest_answer=longest[1],
            uses_chat=_uses_chat(recipe),
            student_vocab=vocab,
            student_context=model_context,
        )
        prompts = longest_prompts(recipe, tokenizer, longest[0])
        needed = {name: tokens + longest[1] for name, tokens in prompts.items()}
        findings += probe_servers(recipe, vocab or len(tokenizer), needed)
    if recipe.reward.models:
        findings += check_reward_models(recipe, tokenizer, sum(longest))
        findings += probe_reward_servers(recipe, chat=_uses_chat(recipe))
    return Preflight(findings, lengths.left_out)


def known_traits(model: Model) -> Traits:
    """The student's traits by its config, wherever that is; what is wrong with it other checks say."""
    if model.path is None:
        return model_traits(model)
    try:
        return traits_of(read_config(model.path).to_dict())
    except (OSError, ValueError):
        return model_traits(model)


def _uses_chat(recipe: Recipe) -> bool:
    """Whether some prompt goes through the chat template."""
    tasks = recipe.tasks
    if any(task.chat or (task.kind in TASKS and TASKS[task.kind].pictures) for task in tasks.values()):
        return True
    return any(
        open_rows(name, task, at).has_messages
        for name, task in tasks.items()
        for at in (train_location(task), eval_location(task))
        if at is not None
    )


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    chat = "a chat template" if tokenizer.chat_template else "no chat template"
    end, pad = tokenizer.eos_token, tokenizer.pad_token
    return f"tokenizer: {len(tokenizer):,} tokens, end {end}, padding {pad}, {chat}"


def _check_agent_texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """What the loop tells the model must be something that the model can read."""
    agent, unknown = recipe.agent, tokenizer.unk_token_id
    texts = {"compress": ["ask_summary"], "retry": ["feedback"]}.get(agent.loop, [])
    for key in texts:
        text = getattr(agent, key)
        if unknown is not None and unknown in tokenizer.encode(text, add_special_tokens=False):
            found = f"unknown characters: {text!r}"
            raise RecipeError(f"agent.{key}", found, "a text that the model's tokenizer can write")


def _check_context(recipe: Recipe, context: int, model_context: int | None) -> None:
    if model_context is not None and context > model_context:
        found, expected = f"{context}", f"at most the model's context of {model_context}"
        raise RecipeErrors(f"recipe {recipe.name}", [RecipeError("rollout.context", found, expected)])
