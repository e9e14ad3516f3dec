"""How long prompts are in tokens, before any work: every row once, and draws of built-in tasks.

Of a dataset that is streamed, the first rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from transformers import PreTrainedTokenizerBase

from practicum.errors import RecipeError, RecipeErrors
from practicum.recipe.derived import is_supervised
from practicum.recipe.schema.recipe import Recipe, Task
from practicum.sessions.chat import make_encoder
from practicum.tasks.check_tasks import tasks_needing_answer
from practicum.tasks.locations import Location, eval_location, open_rows, train_location
from practicum.tasks.prompts import Encoder, Prompt, demonstration
from practicum.tasks.stream import draw_row, eval_prompts, make_stream, to_prompt
from practicum.user_code import shorten

DRAWN = 500
"""Prompts of a built-in task that are measured: there is no end to them."""
_SHOWN = 5
_AT_ONCE = 512
"""Rows that are tokenised in one call."""


@dataclass(slots=True)
class PromptLengths:
    """The longest prompt and answer that a run will see, and the rows that it leaves out."""

    prompt: int = 0
    answer: int = 0
    count: int = 0
    left_out: dict[str, frozenset[int]] = field(default_factory=dict)
    """Rows of each location that are too long, where the task says `too_long: skip`."""
    cut: int = 0
    """Prompts that lose their beginning, where the task says `too_long: cut`."""
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each task with rows: evaluation prompts that are trained on too, and all of them."""

    def findings(self, context: int) -> list[str]:
        """What was measured, in sentences."""
        fits = f"{self.prompt} tokens + answer {self.answer} ≤ {context}"
        sentences = [f"context: longest of {self.count:,} prompts {fits}"]
        for path, rows in self.left_out.items():
            sentences.append(f"too long: {len(rows):,} rows of {path} are left out (too_long: skip)")
        if self.cut:
            sentences.append(f"too long: {self.cut:,} prompts lose their beginning (too_long: cut)")
        for name, (shared, count) in self.shared.items():
            if shared:
                which = f"{shared:,} of its {count:,} different evaluation prompts are trained on too"
                sentences.append(f"tasks.{name}: {which}: its scores are not of held-out prompts")
        return sentences


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt to be measured; `at` and `index` if it is a row of files or of a dataset."""

    prompt: Prompt
    at: Location | None = None
    index: int = 0
    is_held_out: bool = False


def measure_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, context: int) -> PromptLengths:
    """Measure what the recipe's tasks give; rows beyond the context are RecipeErrors."""
    lengths = PromptLengths(answer=0 if is_supervised(recipe) else recipe.rollout.max_new_tokens)
    encode, problems = make_encoder(recipe, tokenizer), []
    for name, task in recipe.tasks.items():
        problems += _measure_task(recipe, name, task, encode, context, lengths)
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    lengths.answer = max(lengths.answer, recipe.rollout.max_new_tokens)
    return lengths


def _measure_task(
    recipe: Recipe, name: str, task: Task, encode: Encoder, context: int, lengths: PromptLengths
) -> list[RecipeError]:
    too_long: list[tuple[_Row, int, int]] = []
    skipped: dict[Location, set[int]] = {}
    trained, held_out = set[int](), set[int]()
    for row, prompt_tokens, answer_tokens in _measured(recipe, encode, name, task):
        kept_tokens = min(prompt_tokens, encode.room(name) or prompt_tokens)
        lengths.count += 1
        (held_out if row.is_held_out else trained).add(hash(repr(row.prompt.content)))
        lengths.cut += kept_tokens < prompt_tokens
        if kept_tokens + answer_tokens <= context:
            lengths.prompt = max(lengths.prompt, kept_tokens)
            lengths.answer = max(lengths.answer, answer_tokens)
        elif task.too_long == "skip" and row.at is not None:
            skipped.setdefault(row.at, set()).add(row.index)
        else:
            too_long.append((row, kept_tokens, answer_tokens))
    if train_location(task) is not None:
        lengths.shared[name] = len(held_out & trained), len(held_out)
    lengths.left_out |= {str(at): frozenset(rows) for at, rows in skipped.items()}
    if too_long:
        return [_too_long(name, task, too_long, context)]
    return [
        RecipeError(f"tasks.{name}.too_long", f"skip, and all rows of {at} are too long", "rows that fit")
        for at, rows in skipped.items()
        if len(rows) == len(open_rows(name, task, at))
    ]


def _rows(recipe: Recipe, name: str, task: Task) -> Iterator[_Row]:
    """Each row of a task that the run may use, or draws of a built-in task."""
    needs_answer, held_out = name in tasks_needing_answer(recipe), eval_location(task)
    if (at := train_location(task)) is not None:
        source = open_rows(name, task, at, needs_answer)
        for index in range(len(source)):
            yield _Row(to_prompt(index, name, task, draw_row(source, index)), at, index)
    else:
        for prompt in make_stream({name: task}, recipe.seed).take(DRAWN):
            yield _Row(prompt)
    # Where rows are left out, later ones take their place.
    rows = sys.maxsize if task.too_long == "skip" and held_out is not None else recipe.eval.rows
    for prompt in eval_prompts({name: task}, rows, recipe.seed):
        yield _Row(prompt, held_out, prompt.index, is_held_out=True)


def _measured(recipe: Recipe, encode: Encoder, name: str, task: Task) -> Iterator[tuple[_Row, int, int]]:
    """Each row with the tokens of its prompt, whole, and of its answer."""
    rows, tokenizer, supervised = _rows(recipe, name, task), encode.tokenizer, is_supervised(recipe)
    unknown = tokenizer.unk_token_id
    while batch := list(islice(rows, _AT_ONCE)):
        answers: list[list[int]] = [[] for _ in batch]
        if supervised:
            texts = [demonstration(row.prompt) for row in batch]
            answers = tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = encode.whole_of([row.prompt for row in batch])
        for row, prompt, answer in zip(batch, prompts, answers, strict=True):
            if unknown is not None and (unknown in prompt.ids or unknown in answer):
                problem = _unknown(row, task, unknown in prompt.ids)
                raise RecipeErrors(f"recipe {recipe.name}", [problem])
            yield row, len(prompt.ids), len(answer) + 1 if supervised else recipe.rollout.max_new_tokens


def _unknown(row: _Row, task: Task, in_prompt: bool) -> RecipeError:
    """A prompt or answer that the tokenizer can't write."""
    text = row.prompt.content if in_prompt else demonstration(row.prompt)
    found = f"{_where(row, task)}: a row with unknown characters: {shorten(repr(text))}"
    advice = "use a model whose tokenizer covers them"
    expected = "texts that the model's tokenizer can write"
    return RecipeError(f"tasks.{row.prompt.task}", found, expected, advice)


def _where(row: _Row, task: Task) -> str:
    return str(row.prompt) if row.at is None else open_rows(row.prompt.task, task, row.at).where(row.index)


def _too_long(name: str, task: Task, rows: list[tuple[_Row, int, int]], context: int) -> RecipeError:
    """The first rows that do not fit, by file and line."""
    shown, in_file = [], rows[0][0].at is not None
    for row, prompt_tokens, answer_tokens in rows[:_SHOWN]:
        total = f"{prompt_tokens} tokens + {answer_tokens} of answer = {prompt_tokens + answer_tokens}"
        shown.append(f"{_where(row, task)}: a prompt of {total}")
    if len(rows) > _SHOWN:
        shown.append(f"and {len(rows) - _SHOWN:,} more")
    advice = "raise rollout.context (up to the model's), or lower rollout.max_new_tokens"
    if in_file and task.too_long == "error":
        advice += f", or set tasks.{name}.too_long to skip or cut"
    return RecipeError(f"tasks.{name}", "; ".join(shown), f"at most rollout.context = {context}", advice)
