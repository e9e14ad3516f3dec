"""Signs that a run learns nothing, as pure functions of its metrics so far: each gives a sentence or None.

They never stop a run. Each is said once, with the key that is likely to change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.derived import has_advantage_estimator, uses_reward
from practicum.recipe.schema.recipe import Recipe

Rows = Sequence[Mapping[str, float]]
"""Metrics of the steps so far, the oldest first."""
SEVERAL, MANY = 5, 10
"""Steps in a row after which something is said."""
MOST = 0.5
_FLAT, _GRADIENT, _CUT = "groups/flat", "train/grad_norm", "rollout/truncated"
_REWARD, _SPREAD = "reward/mean", "reward/std"


class LearningWatch:
    """Takes the metrics of each step, and gives what is new to say."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._rows: list[dict[str, float]] = []
        self._said: set[str] = set()

    def note(self, metrics: Mapping[str, float]) -> list[str]:
        """Sentences about the steps up to this one; none for one that was said before."""
        row = {name: metrics[name] for name in (_FLAT, _GRADIENT, _CUT, _REWARD, _SPREAD) if name in metrics}
        if not row:  # an evaluation, or a step of the critic alone
            return []
        self._rows.append(row)
        sentences = []
        for kind, signs in SIGNS.items():
            warnings = (sign(self._rows, self.recipe) for sign in signs) if kind not in self._said else ()
            if (sentence := next(filter(None, warnings), None)) is not None:
                self._said.add(kind)
                sentences.append(sentence)
        return sentences


def flat_groups(rows: Rows, recipe: Recipe) -> str | None:
    """An estimator that compares the answers to a prompt has found no difference for several steps."""
    traits = estimator_traits(recipe.algorithm.advantage)
    compares = traits.compares_groups and has_advantage_estimator(recipe)
    flat = _last(rows, _FLAT, SEVERAL)
    if not (compares and uses_reward(recipe) and flat and min(flat) == 1.0) or _has_risen(rows):
        return None
    return (
        f"in the last {SEVERAL} steps all answers to a prompt had the same reward (mean {_reward(rows)}): "
        "there is nothing to learn from. The task is too hard or too easy for this model, or the reward "
        "can't tell its answers apart. Look at samples.jsonl; raise rollout.samples, change the task, or "
        "set model.path to a model that answers some prompts right"
    )


def zero_gradient(rows: Rows, recipe: Recipe) -> str | None:
    """The weights have not changed for several steps."""
    norms = _last(rows, _GRADIENT, SEVERAL)
    if not norms or max(norms) > 0.0 or _has_risen(rows):
        return None
    why = "look at samples.jsonl and at tasks: there is nothing in the answers to learn"
    if uses_reward(recipe):
        why = f"no answer is better than another (mean reward {_reward(rows)}): look at reward.functions"
    elif recipe.teachers:
        why = "student and teachers agree on every token: look at teachers.<name>.model and at route"
    return f"the gradient was 0 in the last {SEVERAL} steps, so the weights did not change: {why}"


def constant_reward(rows: Rows, recipe: Recipe) -> str | None:
    """Every answer of many steps had one and the same reward."""
    rewards, spreads = _last(rows, _REWARD, MANY), _last(rows, _SPREAD, MANY)
    if not (rewards and spreads and uses_reward(recipe)) or _has_risen(rows):
        return None
    if max(spreads) > 0.0 or max(rewards) > min(rewards):
        return None
    return (
        f"every answer of the last {MANY} steps had the reward {_reward(rows)}: the reward does not depend "
        "on the answers, or none of them earns any. Look at reward.functions and samples.jsonl"
    )


def cut_answers(rows: Rows, recipe: Recipe) -> str | None:
    """Most answers have not come to their end for several steps."""
    shares = _last(rows, _CUT, SEVERAL)
    if not shares or min(shares) <= MOST:
        return None
    return (
        f"{sum(shares) / len(shares):.0%} of the answers of the last {SEVERAL} steps were cut off at "
        f"rollout.max_new_tokens = {recipe.rollout.max_new_tokens}: raise it, or add the token that ends an "
        "answer to rollout.stop"
    )


SIGNS: dict[str, tuple[Callable[[Rows, Recipe], str | None], ...]] = {
    "signal": (flat_groups, zero_gradient, constant_reward),
    "length": (cut_answers,),
}
"""By kind. Those of one kind have one cause: only the first that is seen is said."""


def _last(rows: Rows, name: str, steps: int) -> list[float]:
    """A metric in the last steps; nothing if there are fewer, or if it is not in all of them."""
    values = [row[name] for row in rows[-steps:] if name in row]
    return values if len(values) == steps else []


def _has_risen(rows: Rows) -> bool:
    """Whether the reward is above that of the first step: what was learnt to the end teaches no more."""
    rewards = [row[_REWARD] for row in (rows[0], rows[-1]) if _REWARD in row]
    return len(rewards) == 2 and rewards[1] > rewards[0]


def _reward(rows: Rows) -> str:
    return f"{rows[-1].get(_REWARD, 0.0):.3g}"
