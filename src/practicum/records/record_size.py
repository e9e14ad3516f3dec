"""How much a run will record, by its recipe alone."""

from __future__ import annotations

from math import prod

from practicum.dataplane.fields import FIELDS, Field
from practicum.dataplane.stages import Plan
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.counts import count
from practicum.recipe.derived import recorded_groups
from practicum.recipe.schema.recipe import Recipe
from practicum.records.record_files import WIDE

_CHARACTERS = {"float": 11, "int": 5, "bool": 2}
"""Characters of a number and its comma, by the beginning of its type."""
_UPDATE = 6 * 11 + 8 * (5 + 11)
"""Characters that the update adds for a token: six numbers, and the student's eight most likely tokens."""
_ROW = 1200
"""Characters of a row beside its tokens: names, tags, places."""


def record_bytes(recipe: Recipe, plan: Plan, prompt_tokens: float, response_tokens: float) -> float:
    """Bytes that a step records, about, with prompts and answers of these lengths."""
    groups, sizes = recorded_groups(recipe), count(recipe)
    prompts = sizes.prompts if groups is None else min(groups, sizes.prompts)
    greedy = 1 if estimator_traits(recipe.algorithm.advantage).greedy_baseline else 0
    tokens = {"prompt": prompt_tokens, "response": response_tokens}
    tokens["sequence"] = prompt_tokens + response_tokens
    top_k = 0 if recipe.distill is None else recipe.distill.top_k
    row = _ROW + response_tokens * _UPDATE
    for name in {name for stage in plan for name in stage.writes}:
        row += _characters(FIELDS[name], tokens, top_k, everything=groups is None)
    return prompts * (sizes.samples + greedy) * row


def _characters(field: Field, tokens: dict[str, float], top_k: int, *, everything: bool) -> float:
    # Widths other than top-k follow from models: they are left out, and so are wide columns but for `all`.
    widths = [axis if isinstance(axis, int) else top_k if axis == "K" else 0 for axis in field.trailing]
    if not everything and prod(widths) > WIDE:
        return 0.0
    each = next((size for kind, size in _CHARACTERS.items() if field.dtype.startswith(kind)), 0)
    return tokens.get(field.extent, 0.0) * prod(widths) * each


def record_line(recipe: Recipe, plan: Plan) -> str:
    """What a run will record, in a sentence; answers are taken to be as long as they may be."""
    groups = recorded_groups(recipe)
    if groups == 0:
        return "record: nothing (track.record)"
    length = recipe.rollout.max_new_tokens
    step = record_bytes(recipe, plan, length, length)
    what = "all groups" if groups is None else f"{groups} group{'' if groups == 1 else 's'}"
    whole = size_text(step * recipe.train.steps)
    return f"record: {what} of a step, at most about {size_text(step)}, {whole} in all (track.record)"


def size_text(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
