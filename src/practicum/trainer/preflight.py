"""What can be known before any work but needs files, a tokenizer or a model: `practicum check`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from practicum.errors import MissingExtraError, RecipeError, RecipeErrors
from practicum.models.load_model import load_model, load_tokenizer, model_facts, stop_ids
from practicum.models.model_files import read_config
from practicum.recipe.derived import on_ray
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.model_traits import Traits, model_traits, traits_of
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.rewards.check_reward_models import check_rewarders
from practicum.roles.load_teachers import probe_servers
from practicum.roles.make_engine import rollout_context
from practicum.roles.reward_models import probe_reward_servers
from practicum.runtime.local import load_reference
from practicum.runtime.ray.check_cluster import check_cluster
from practicum.sessions.loops import find_loop
from practicum.sessions.prompt_encoder import make_encoder
from practicum.tasks.check_tasks import check_tasks, tasks_needing_answer
from practicum.tasks.prompts import Prompt, demonstration
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.teachers.check_routes import check_routes
from practicum.teachers.teacher_checks import check_teachers, longest_prompts
from practicum.trainer.saver import crash_cost
from practicum.trainer.trial import describe_tools, try_rewards

LOOKED_AT = 2_000
"""Prompts that are encoded to find the longest one."""


def preflight(loaded: LoadedRecipe) -> list[str]:
    """Findings in sentences; mistakes are RecipeErrors."""
    recipe = loaded.recipe
    findings = check_without_models(recipe)
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


def check_without_models(recipe: Recipe) -> list[str]:
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
    longest = _longest(recipe, tokenizer)
    context = rollout_context(recipe, model_context)
    _check_context(recipe, longest, context, model_context)
    findings.append(
        f"context: longest of {LOOKED_AT:,} prompts {longest[0]} tokens + answer {longest[1]} ≤ {context}"
    )
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
        findings += check_rewarders(recipe, tokenizer, sum(longest))
        findings += probe_reward_servers(recipe, chat=_uses_chat(recipe))
    return findings


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
    return any(task.chat for task in recipe.tasks.values()) or any(
        not isinstance(prompt.content, str) for prompt in _prompts(recipe)
    )


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    chat = "a chat template" if tokenizer.chat_template else "no chat template"
    end, pad = tokenizer.eos_token, tokenizer.pad_token
    return f"tokenizer: {len(tokenizer):,} tokens, end {end}, padding {pad}, {chat}"


def _prompts(recipe: Recipe) -> Iterable[Prompt]:
    stream = make_stream(recipe.tasks, recipe.seed, needs_answer=tasks_needing_answer(recipe))
    yield from stream.take(LOOKED_AT)
    yield from eval_prompts(recipe.tasks, recipe.eval.rows, recipe.seed)


def _longest(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Longest prompt and answer in tokens; a text that the tokenizer can't write is an error."""
    supervised = recipe.algorithm.loss == "supervised"
    unknown = tokenizer.unk_token_id
    prompt_tokens = answer_tokens = 0
    encode = make_encoder(recipe, tokenizer)
    for prompt in _prompts(recipe):
        ids = encode(prompt).ids
        answer = tokenizer.encode(demonstration(prompt), add_special_tokens=False) if supervised else []
        if unknown is not None and unknown in (*ids, *answer):
            raise RecipeErrors(
                f"recipe {recipe.name}",
                [
                    RecipeError(
                        f"tasks.{prompt.task}",
                        f"a row with unknown characters: {prompt.content!r}",
                        "texts that the model's tokenizer can write",
                        "use a model whose tokenizer covers them",
                    )
                ],
            )
        prompt_tokens = max(prompt_tokens, len(ids))
        answer_tokens = max(answer_tokens, len(answer) + 1)
    return prompt_tokens, max(answer_tokens, recipe.rollout.max_new_tokens)


def _check_agent_texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """What the loop tells the model must be something that the model can read."""
    agent, unknown = recipe.agent, tokenizer.unk_token_id
    texts = {"compress": ["ask_summary"], "retry": ["feedback"]}.get(agent.loop, [])
    for key in texts:
        text = getattr(agent, key)
        if unknown is not None and unknown in tokenizer.encode(text, add_special_tokens=False):
            found = f"unknown characters: {text!r}"
            raise RecipeError(f"agent.{key}", found, "a text that the model's tokenizer can write")


def _check_context(recipe: Recipe, longest: tuple[int, int], context: int, model_context: int | None) -> None:
    prompt, answer = longest
    if model_context is not None and context > model_context:
        found, expected = f"{context}", f"at most the model's context of {model_context}"
        raise RecipeErrors(f"recipe {recipe.name}", [RecipeError("rollout.context", found, expected)])
    if prompt + answer > context:
        raise RecipeErrors(
            f"recipe {recipe.name}",
            [
                RecipeError(
                    "rollout.max_new_tokens",
                    f"a prompt of {prompt} tokens + {answer} of answer = {prompt + answer}",
                    f"at most rollout.context = {context}",
                    "raise rollout.context (up to the model's), or use shorter prompts or answers",
                )
            ],
        )
