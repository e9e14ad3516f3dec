"""Evaluation on held-out prompts, per domain, on a partition of its own."""

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
from practicum.dataplane.keys import Key, Tags
from practicum.engines.protocol import Sampling
from practicum.errors import PracticumError, RecipeError
from practicum.observe.tables import score_table
from practicum.observe.text import say
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Async, Recipe
from practicum.roles.stage_table import evaluation_plan
from practicum.runtime.start_roles import Roles, loading, start_roles
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import eval_prompts
from practicum.trainer.run_folder import append_lines, folder_of
from practicum.trainer.run_models import resolve_models
from practicum.trainer.samples import choose_prompts, describe

EVAL = "eval"
SEED_OFFSET = 1_000_000_007
"""Added to the run's seed, so that an evaluation prompt never draws a training prompt's numbers."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores by metric, and answers as in eval.jsonl; both empty if nothing was evaluated."""

    scores: dict[str, float] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)


def evaluate(
    recipe: Recipe, roles: Roles, prompts: Sequence[Prompt], log: Callable[[str], None], *, step: int = 0
) -> Evaluation:
    """Greedy score, mean@k and pass@k, over all prompts and by domain; and answers of track.eval_prompts.

    It is of the weights after `step`, whatever else is sampled meanwhile.
    Failed sessions are left out of the scores; `log` is told why they failed.
    """
    if not prompts:
        return Evaluation()
    rules = recipe.eval
    common = {"max_new_tokens": recipe.rollout.max_new_tokens, "stop": roles.stop}
    drawn = Sampling(temperature=rules.temperature, **common)
    attempts = [Attempt(p, i, drawn) for p in prompts for i in range(rules.samples)]
    if rules.greedy:
        greedy = Sampling(greedy=True, **common)
        attempts += [Attempt(p, rules.samples, greedy, is_baseline=True) for p in prompts]
    if not attempts:
        return Evaluation()
    # The copy that has these weights, or is the next to take them: see `Schedule.copy_of`.
    copy = step % len(roles.eval_rollouts)
    rollout = roles.eval_rollouts[copy]
    try:
        with roles.weights(copy, step):
            batch = rollout.rollout(attempts, EVAL, seed=recipe.seed + SEED_OFFSET)
        rollout.reward(batch.where(lambda _, tags: tags.status == "ready"))
        batch = roles.store.batch(EVAL, batch.keys)
        failed = {key[:2]: tags for key, tags in batch if tags.failure}.values()
        traces = {tags.failure: tags.trace for tags in failed}
        for failure, count in Counter(tags.failure for tags in failed).most_common():
            trace = traces[failure]
            log(f"failed in the evaluation ({count}×): {failure}{f'{chr(10)}{trace}' if trace else ''}")
        chosen = choose_prompts({key.prompt: tags.task for key, tags in batch}, recipe.track.eval_prompts)
        shown = batch.where(lambda key, _: key.prompt in chosen)
        answers = describe(step, roles, shown, rollout.prompts)
        return Evaluation(scores(batch, rules.samples, rules.pass_threshold), answers)
    finally:
        left = roles.store.batch(EVAL).keys
        roles.store.clear(EVAL)
        rollout.forget(left)


def evaluate_recipe(
    loaded: LoadedRecipe, model: str | None = None, *, quiet: bool = False, answers: Path | None = None
) -> dict[str, float]:
    """Scores of the recipe's model (or `model`) on its held-out prompts, shown as a table unless `quiet`.

    `answers` is a file that gets the answers, as lines of JSON.
    """
    console = Console(quiet=quiet)
    if model is not None:
        loaded = replace(loaded, recipe=_with_model(loaded.recipe, model))
    elif (trained := folder_of(loaded.recipe)).is_used:
        hint = f"the model that the recipe starts from; --model {trained.path} is the one it trained"
        say(hint, console)
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
    """Scores and answers of the recipe's model, or of the one in this folder, on its held-out prompts."""
    if model is not None:
        recipe = _with_model(recipe, str(model))
    recipe = recipe.model_copy(update={"async": Async()})
    roles = start_roles(recipe, evaluation_plan(), Watch(recipe.checks, say))
    try:
        return evaluate(recipe, roles, eval_prompts(recipe.tasks, recipe.eval.rows, recipe.seed), say)
    finally:
        roles.close()


def _with_model(recipe: Recipe, model: str) -> Recipe:
    spec = recipe.model.model_copy(update={"path": model, "make": None, "lora": None})
    return recipe.model_copy(update={"model": spec})


def scores(batch: BatchRef, k: int, pass_threshold: float) -> dict[str, float]:
    """Metrics of judged evaluation rows; greedy ones are tagged as baselines."""
    sessions = {key[:2]: (key, tags) for key, tags in batch}
    rows = {name: row for name, row in sessions.items() if row[1].reward is not None}
    failed = len(sessions) - len(rows)
    out = {"eval/failed": float(failed)} if failed else {}
    out |= _means("eval/greedy", [(t.domain, t.reward) for _, t in rows.values() if t.is_baseline])
    if k:
        sampled = [(key, tags) for key, tags in rows.values() if not tags.is_baseline]
        out |= _means(f"eval/mean@{k}", [(t.domain, t.reward) for _, t in sampled])
        out |= _means(f"eval/pass@{k}", _passes(sampled, pass_threshold))
    return out


def _passes(rows: Sequence[tuple[Key, Tags]], threshold: float) -> list[tuple[str, float | None]]:
    best: dict[tuple[int, str], float] = {}
    for key, tags in rows:
        name = (key.prompt, tags.domain)
        best[name] = max(best.get(name, float("-inf")), tags.reward or 0.0)
    return [(domain, float(reward >= threshold)) for (_, domain), reward in best.items()]


def _means(name: str, values: Sequence[tuple[str, float | None]]) -> dict[str, float]:
    by_domain: dict[str, list[float]] = {}
    for domain, value in values:
        if value is not None:
            by_domain.setdefault(domain, []).append(value)
    if not by_domain:
        return {}
    out = {name: statistics.fmean(v for values in by_domain.values() for v in values)}
    return out | {f"{name}/{d}": statistics.fmean(v) for d, v in sorted(by_domain.items())}
