"""What can be known before any work but needs files, a tokenizer or a model: `practicum check`."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from practicum.errors import RecipeError, RecipeErrors
from practicum.models.load import context_length, load_model, load_tokenizer, stop_ids
from practicum.recipe.load import LoadedRecipe
from practicum.recipe.schema import Recipe
from practicum.rollout.loops import find_loop
from practicum.runtime.local import load_reference, rollout_context
from practicum.tasks.check import check_tasks, tasks_needing_answer
from practicum.tasks.prompts import Prompt, demonstration, encode_prompt
from practicum.tasks.stream import eval_prompts, make_stream

LOOKED_AT = 2_000
"""Prompts that are encoded to find the longest one."""


def preflight(loaded: LoadedRecipe) -> list[str]:
    """Findings in sentences; mistakes are RecipeErrors."""
    recipe = loaded.recipe
    findings = check_tasks(recipe)
    find_loop(recipe.rollout.loop)
    tokenizer = load_tokenizer(recipe.model)
    findings.append(_describe_tokenizer(tokenizer))
    model = load_model(recipe.model, recipe.seed)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    findings.append(f"model: {type(model).__name__}, {millions:.2f}M parameters, on {model.device}")
    stop_ids(model, tokenizer, recipe.rollout.stop)
    longest = _longest(recipe, tokenizer)
    context = rollout_context(recipe, context_length(model))
    _check_context(recipe, longest, context, context_length(model))
    findings.append(
        f"context: longest of {LOOKED_AT:,} prompts {longest[0]} tokens + answer {longest[1]} ≤ {context}"
    )
    if recipe.algorithm.kl.reference is not None:
        load_reference(recipe, model)
        findings.append(f"reference: {recipe.algorithm.kl.reference} loads")
    return findings


def check_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model_context: int | None) -> str:
    """Prompts can be written by the tokenizer and fit the context with their answers; says their length."""
    longest = _longest(recipe, tokenizer)
    context = rollout_context(recipe, model_context)
    _check_context(recipe, longest, context, model_context)
    return f"context: longest of {LOOKED_AT:,} prompts {longest[0]} tokens + answer {longest[1]} ≤ {context}"


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
    for prompt in _prompts(recipe):
        task = recipe.tasks[prompt.task]
        ids = encode_prompt(prompt, tokenizer, chat=task.chat, system=task.system)
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
