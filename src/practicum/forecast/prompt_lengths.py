"""How long a recipe's prompts are, by its own tokenizer. The one part of a forecast that needs torch."""

from __future__ import annotations

from statistics import fmean

from practicum.models.load_model import load_tokenizer
from practicum.recipe.schema.recipe import Recipe
from practicum.sessions.prompt_encoder import make_encoder
from practicum.tasks.check_tasks import tasks_needing_answer
from practicum.tasks.stream import make_stream

LOOKED_AT = 256


def mean_prompt_tokens(recipe: Recipe) -> float:
    """Mean tokens of the first prompts of the training stream."""
    encode = make_encoder(recipe, load_tokenizer(recipe.model))
    stream = make_stream(recipe.tasks, recipe.seed, needs_answer=tasks_needing_answer(recipe))
    return fmean(len(encode(prompt).ids) for prompt in stream.take(LOOKED_AT))
