"""Evaluation on held-out prompts, per domain, on a separate partition."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Columns
from practicum.engines.protocol import Sampling
from practicum.errors import PracticumError, RecipeError
from practicum.models.load_model import load_tokenizer
from practicum.observe.text import say, score_table
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Recipe, RewardFunction
from practicum.recipe.schema.runtime_section import Runtime
from practicum.roles.stage_table import evaluation_plan
from practicum.runtime.start_roles import Roles, loading, start_roles
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import eval_prompts
from practicum.trainer.run_folder import RunFolder, append_lines, folder_of
from practicum.trainer.run_models import resolve_models
from practicum.trainer.sample_step import PASS_REWARD
from practicum.trainer.samples import describe, mean_by_name

EVAL = "eval"
SEED_OFFSET = 1_000_000_007
"""Offset of the run's seed, so that evaluation and training prompts use different random numbers."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores by metric, and rows of eval.jsonl. Both are empty if nothing was evaluated."""

    scores: dict[str, float] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)


def evaluate(
    recipe: Recipe, roles: Roles, prompts: Sequence[Prompt], log: Callable[[str], None], *, step: int = 0
) -> Evaluation:
    """Return greedy score, mean@k and pass@k, overall and by domain, and the responses.

    Uses the weights after `step`, even while other steps are sampled. Failed sessions are left out of the
    scores, and `log` receives the reasons.
    """
    if not prompts:
        return Evaluation()
    samples = recipe.eval.samples
    common = {"max_new_tokens": recipe.rollout.max_new_tokens, "stop": roles.stop}
    drawn, greedy = Sampling(temperature=1.0, **common), Sampling(greedy=True, **common)
    attempts = [Attempt(p, i, drawn) for p in prompts for i in range(samples)]
    attempts += [Attempt(p, samples, greedy, is_baseline=True) for p in prompts]
    # The copy that has these weights or takes them next, see `Schedule.copy_of`.
    copy = step % len(roles.eval_rollouts)
    rollout = roles.eval_rollouts[copy]
    try:
        with roles.weights(copy, step):
            batch = rollout.rollout(attempts, EVAL, seed=recipe.seed + SEED_OFFSET)
        rollout.reward(batch.where(lambda _, tags: tags.status == "ready"))
        batch = roles.store.batch(EVAL, batch.keys)
        failed = {key[:2]: tags for key, tags in batch if tags.failure}.values()
        for (failure, trace), count in Counter((t.failure, t.trace) for t in failed).most_common():
            log(f"failed in the evaluation ({count}×): {failure}{f'{chr(10)}{trace}' if trace else ''}")
        return Evaluation(scores(batch, samples), describe(step, roles, batch, rollout.prompts))
    finally:
        left = roles.store.batch(EVAL).keys
        roles.store.clear(EVAL)
        rollout.forget(left)


def evaluate_recipe(
    loaded: LoadedRecipe, model: str | None = None, *, quiet: bool = False, answers: Path | None = None
) -> dict[str, float]:
    """Evaluate the recipe's model (or `model`), print a table unless `quiet`, write `answers` to JSONL."""
    console = Console(quiet=quiet)
    if model is not None:
        loaded = replace(loaded, recipe=with_model(loaded.recipe, model))
    elif RunFolder(trained := folder_of(loaded.recipe)).is_used:
        say(f"the recipe's initial model; use --model {trained} for the trained one", console)
    loaded, taken = resolve_models(loaded)
    for sentence in taken:
        say(sentence, console)
    recipe = loaded.recipe
    if not quiet:
        print(f"{loading(recipe)} …", file=sys.stderr)
    try:
        evaluation = evaluate_model(recipe)
    except RecipeError as error:
        if model is None or error.path != "model.path":
            raise
        raise RecipeError("--model", error.found, error.expected, error.suggestion) from None
    if not evaluation.scores:
        raise PracticumError("nothing to evaluate: no task is built-in or has an eval_file or eval_split")
    if answers is not None:
        answers.unlink(missing_ok=True)
        append_lines(answers, evaluation.answers)
    rows = {name.removeprefix("eval/"): {"score": value} for name, value in evaluation.scores.items()}
    say(model or recipe.model.path or "a new model with random weights", console)
    console.print(score_table("", rows, ["score"]))
    return evaluation.scores


def evaluate_model(recipe: Recipe, model: Path | None = None) -> Evaluation:
    """Return scores and responses of the recipe's model, or of the model in this folder."""
    if model is not None:
        recipe = with_model(recipe, str(model))
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"lag": 0})})
    roles = start_roles(recipe, evaluation_plan(), Watch(recipe.checks, say))
    try:
        return evaluate(recipe, roles, eval_prompts(recipe.tasks, recipe.eval.rows, recipe.seed), say)
    finally:
        roles.close()


def sample_model(
    recipe: Recipe, prompts: Sequence[str], task: str | None = None, *, greedy: bool
) -> list[str]:
    """Return the model's response to each prompt of `task`, as text, in a session of the recipe's loop."""
    names = list(recipe.tasks)
    if (name := task or names[0]) not in names:
        raise PracticumError(f"task {name}: the recipe has {', '.join(names)}")
    reward = recipe.reward.model_copy(update={"functions": [RewardFunction(use="exact")], "models": {}})
    read_as = recipe.tasks[name].model_copy(update={"rewards": None})
    runtime, rollout = Runtime(threads=recipe.runtime.threads), recipe.rollout.model_copy(update={"lag": 0})
    update = {"reward": reward, "tasks": {name: read_as}, "teachers": {}, "distill": None}
    recipe = recipe.model_copy(update=update | {"runtime": runtime, "rollout": rollout})
    roles = start_roles(recipe, evaluation_plan(), Watch(recipe.checks, say))
    try:
        sampling = Sampling(rollout.max_new_tokens, roles.stop, greedy=True)
        if not greedy:
            drawn = replace(sampling, greedy=False, temperature=rollout.temperature)
            sampling = replace(drawn, top_p=rollout.top_p, top_k=rollout.top_k)
        asked = [Prompt(i, name, name, text, None, {}, 0, i) for i, text in enumerate(prompts)]
        with roles.weights(0, 0):
            batch = roles.eval_rollouts[0].rollout(
                [Attempt(prompt, 0, sampling) for prompt in asked], EVAL, seed=recipe.seed
            )
        if failed := next((tags.failure for tags in batch.tags if tags.failure), None):
            raise PracticumError(f"a session failed: {failed}")
        tokenizer = load_tokenizer(recipe.model)
        responses = Columns("sample", roles.store.get(batch, ["response_ids"])).ragged("response_ids")
        texts = {
            key.prompt: str(tokenizer.decode(responses[i], skip_special_tokens=True))
            for i, key in enumerate(batch.keys)  # the last trajectory of each session stays
        }
        return [texts[prompt.uid] for prompt in asked]
    finally:
        roles.close()


def with_model(recipe: Recipe, model: str) -> Recipe:
    """Return the recipe with another student: a folder, a hub name, a run or a checkpoint."""
    spec = recipe.model.model_copy(update={"path": model, "random_init": None, "lora": None})
    return recipe.model_copy(update={"model": spec})


def scores(batch: BatchRef, k: int) -> dict[str, float]:
    """Return the metrics of scored evaluation rows. Greedy rows are tagged as baselines."""
    sessions = {key[:2]: (key.prompt, tags) for key, tags in batch}.values()
    judged = [(prompt, tags, tags.reward) for prompt, tags in sessions if tags.reward is not None]
    failed = len(sessions) - len(judged)
    out = {"eval/failed": float(failed)} if failed else {}
    out |= _means("eval/greedy", [(tags.domain, reward) for _, tags, reward in judged if tags.is_baseline])
    if k:
        sampled = [(prompt, t.domain, reward) for prompt, t, reward in judged if not t.is_baseline]
        best: dict[tuple[int, str], float] = {}
        for prompt, domain, reward in sampled:
            best[prompt, domain] = max(best.get((prompt, domain), float("-inf")), reward)
        out |= _means(f"eval/mean@{k}", [(domain, reward) for _, domain, reward in sampled])
        passes = [(domain, float(reward >= PASS_REWARD)) for (_, domain), reward in best.items()]
        out |= _means(f"eval/pass@{k}", passes)
    return out


def _means(name: str, values: Sequence[tuple[str, float]]) -> dict[str, float]:
    by_domain = mean_by_name((f"{name}/{domain}", value) for domain, value in sorted(values))
    return {name: statistics.fmean(value for _, value in values)} | by_domain if values else {}
