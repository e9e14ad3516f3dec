"""Evaluation on held-out prompts, per domain, on a partition of its own."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.engines.protocol import Sampling
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.start_roles import Roles
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt

EVAL = "eval"
SEED_OFFSET = 1_000_000_007
"""Added to the run's seed, so that an evaluation prompt never draws a training prompt's numbers."""


def evaluate(
    recipe: Recipe, roles: Roles, prompts: Sequence[Prompt], log: Callable[[str], None]
) -> dict[str, float]:
    """Greedy score, mean@k and pass@k, over all prompts and by domain.

    Failed sessions are left out; `log` is told why they failed.
    """
    if not prompts:
        return {}
    rules = recipe.eval
    common = {"max_new_tokens": recipe.rollout.max_new_tokens, "stop": roles.stop}
    drawn = Sampling(temperature=rules.temperature, **common)
    attempts = [Attempt(p, i, drawn) for p in prompts for i in range(rules.samples)]
    if rules.greedy:
        greedy = Sampling(greedy=True, **common)
        attempts += [Attempt(p, rules.samples, greedy, is_baseline=True) for p in prompts]
    if not attempts:
        return {}
    try:
        batch = roles.eval_rollout.rollout(attempts, EVAL, seed=recipe.seed + SEED_OFFSET)
        roles.eval_rollout.reward(batch.where(lambda _, tags: tags.status == "ready"))
        batch = roles.store.batch(EVAL, batch.keys)
        failed = {key[:2]: tags for key, tags in batch if tags.failure}.values()
        traces = {tags.failure: tags.trace for tags in failed}
        for failure, count in Counter(tags.failure for tags in failed).most_common():
            trace = traces[failure]
            log(f"failed in the evaluation ({count}×): {failure}{f'{chr(10)}{trace}' if trace else ''}")
        return scores(batch, rules.samples, rules.pass_threshold)
    finally:
        left = roles.store.batch(EVAL).keys
        roles.store.clear(EVAL)
        roles.eval_rollout.forget(left)


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
