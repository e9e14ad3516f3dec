"""Check a recipe's data and tokenizer before a run, in one pass over the rows: shape, vocabulary, length.

Checks all rows of files, and a sample of the prompts of built-in tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from transformers import PreTrainedTokenizerBase

from practicum.errors import DataError, EngineError, RecipeError, RecipeErrors
from practicum.models.load_model import stop_ids
from practicum.models.model_files import read_generation
from practicum.models.tokenizer import CHARACTERS
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.score_functions import RewardFunctions
from practicum.sessions.attempts import MESSAGES
from practicum.sessions.chat import Chat, SessionStart, make_encoder, tokenise
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.builtin import TASKS, find_kind
from practicum.tasks.messages import user
from practicum.tasks.prompts import Encoder, Prompt
from practicum.tasks.rows import RowSource, find_rows
from practicum.tasks.stream import eval_prompts, make_stream, share_places
from practicum.tasks.tables import eval_location, train_location
from practicum.user_code import shorten

DRAWN = 500
"""Number of prompts to check of a built-in task, which generates prompts without end."""
_SHOWN = 5
_SAID = "17"
"""An assistant turn that templates do not change."""
_BATCH = 512
"""Rows tokenised per call."""


@dataclass(slots=True)
class DataReport:
    """The longest prompt and response in tokens, and the rows that a run skips."""

    answer: int
    prompt: int = 0
    prompts: int = 0
    cut: int = 0
    """Number of prompts whose start is cut (`too_long: cut`)."""
    evaluated: int = 0
    uses_chat: bool = False
    left_out: dict[str, frozenset[int]] = field(default_factory=dict)
    """Skipped rows by file (`too_long: skip`)."""
    findings: list[str] = field(default_factory=list)


def check_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, context: int) -> DataReport:
    """Check tasks, reward functions and rows. Raise RecipeErrors for mistakes, else DataError for rows."""
    report = DataReport(0 if recipe.demonstrates else recipe.rollout.max_new_tokens)
    problems: list[RecipeError] = []
    faults: list[str] = []
    try:
        RewardFunctions(recipe.tasks, recipe.reward)
    except (RecipeError, RecipeErrors) as problem:
        problems += getattr(problem, "errors", [problem])
    encode = make_encoder(recipe, tokenizer)
    places = share_places([task.weight for task in recipe.tasks.values()])
    for name, share in zip(recipe.tasks, places, strict=True):
        prompts = recipe.train.prompts * share // sum(places) if recipe.train.steps else 0
        try:
            problems += _TaskCheck(recipe, name, encode, context, report, prompts).run()
        except (RecipeError, RecipeErrors) as problem:
            problems += getattr(problem, "errors", [problem])
        except DataError as fault:
            faults.append(str(fault))
    if recipe.eval.every and not report.evaluated and not problems and not faults:
        found = f"{recipe.eval.every} without evaluation rows"
        name, task = next(iter(recipe.tasks.items()))
        key = "eval_file" if task.dataset is None else "eval_split"
        advice = f"set tasks.{name}.{key} to held-out rows, or eval.every to 0"
        problems.append(RecipeError("eval.every", found, "rows to evaluate on", advice))
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    if faults:
        raise DataError("\n".join(faults))
    report.answer = max(report.answer, recipe.rollout.max_new_tokens)
    fits = f"{report.prompt} tokens + response {report.answer} ≤ {context}"
    report.findings.append(f"context: longest of {report.prompts:,} prompts {fits}")
    for path, rows in report.left_out.items():
        report.findings.append(f"too long: {len(rows):,} rows of {path} are skipped (too_long: skip)")
    if report.cut:
        report.findings.append(f"too long: {report.cut:,} prompts are cut at the start (too_long: cut)")
    return report


class _TaskCheck:
    def __init__(
        self, recipe: Recipe, name: str, encode: Encoder, context: int, report: DataReport, prompts: int
    ) -> None:
        self.recipe, self.name, self.task, self.report = recipe, name, recipe.tasks[name], report
        self.encode, self.context, self.prompts = encode, context, prompts
        self._trained, self._held_out = set[int](), set[int]()
        self._too_long: list[str] = []
        self._unknown: list[str] = []

    def run(self) -> Iterator[RecipeError]:
        """Yield mistakes in the recipe. Raise DataError for bad rows."""
        task, is_chat = self.task, self.task.chat
        if task.kind is not None:
            is_chat |= find_kind(task.kind, self.name).pictures
            self._draw(task.kind)
        else:
            sources = [source for is_held_out in (False, True) if (source := self._read(is_held_out))]
            is_chat |= any(source.has_messages or source.has_pictures for source in sources)
            # The prompts of a step must be distinct.
            rows, prompts = len(sources[0]), self.prompts
            rows -= len(self.report.left_out.get(sources[0].name, ()))
            if rows < prompts:
                found = f"{rows} rows of {sources[0].name} for {prompts} prompts of a step"
                advice = "rows would repeat within a step: lower train.prompts, or add rows"
                yield RecipeError(f"tasks.{self.name}", found, f"at least {prompts} rows", advice)
        self.report.uses_chat |= is_chat
        if task.system is not None and not is_chat:
            key, expected = f"tasks.{self.name}", "chat prompts"
            advice = f"set {key}.chat: true, or remove system"
            yield RecipeError(f"{key}.system", "a system message", expected, advice)
        if self._unknown:
            expected = "text that the model's tokenizer can encode"
            advice = "use a model that covers these characters"
            if self.recipe.model.random_init is not None:
                advice = f"use a pretrained model, or only random_init's characters: {CHARACTERS!r}"
            found = f"{self._unknown[0]} ({len(self._unknown):,} such rows)"
            yield RecipeError(f"tasks.{self.name}", found, expected, advice)
        if self._too_long:
            more = len(self._too_long) - _SHOWN
            shown = "; ".join(self._too_long[:_SHOWN]) + (f"; and {more:,} more" if more > 0 else "")
            advice = "raise rollout.context (up to the model's), or lower rollout.max_new_tokens"
            if task.kind is None and task.too_long == "error":
                advice += f", or set tasks.{self.name}.too_long to skip or cut"
            yield RecipeError(
                f"tasks.{self.name}", shown, f"at most rollout.context = {self.context}", advice
            )

    def _draw(self, kind: str) -> None:
        held_out = eval_prompts({self.name: self.task}, self.recipe.eval.rows, self.recipe.seed)
        self._measure(make_stream({self.name: self.task}, self.recipe.seed).take(DRAWN))
        self._measure(held_out, is_held_out=True)
        found = f"{'built-in ' if kind in TASKS else ''}{kind}, {len(held_out)} evaluation prompts"
        if len(held_out) < (asked := self.recipe.eval.rows):
            found += f" (of {asked}: its options allow no more)"
        self.report.findings.append(f"tasks.{self.name}: {found}")

    def _read(self, is_held_out: bool) -> RowSource | None:
        """Check the rows for training or evaluation in one pass."""
        task, report = self.task, self.report
        at = eval_location(task) if is_held_out else train_location(task)
        if at is None:
            key = "eval_file" if task.dataset is None else "eval_split"
            report.findings.append(f"tasks.{self.name}: not evaluated, as {key} is not set")
            return None
        source, skips = find_rows(self.name, task, at), task.too_long == "skip"
        # Skipped rows are replaced by later ones.
        measured = self.recipe.eval.rows if is_held_out and not skips else sys.maxsize
        rows = (source.to_prompt(i, i, 0, row) for i, row in source.scan() if i < measured)
        left_out = self._measure(rows, source, is_held_out)
        source.check(self.name in self.recipe.tasks_needing_answer)
        if left_out:
            report.left_out[str(at)] = left_out
        if len(left_out) == len(source):
            found = f"skip, and all rows of {at} are too long"
            raise RecipeError(f"tasks.{self.name}.too_long", found, "rows that fit")
        report.findings.append(f"tasks.{self.name}: {at} has {len(source)} rows")
        if is_held_out and (shared := len(self._held_out & self._trained)):
            which = f"{shared:,} of {len(self._held_out):,} distinct evaluation prompts"
            report.findings.append(f"tasks.{self.name}: {which} are also training prompts")
        return source

    def _measure(
        self, prompts: Iterable[Prompt], source: RowSource | None = None, is_held_out: bool = False
    ) -> frozenset[int]:
        """Encode prompts in batches, record those that do not fit, and return the rows to skip."""
        recipe, report, remaining, left_out = self.recipe, self.report, iter(prompts), set[int]()
        unknown = self.encode.tokenizer.unk_token_id
        while batch := list(islice(remaining, _BATCH)):
            answers: list[list[int]] = [[]] * len(batch)
            if recipe.demonstrates:  # bad answers are reported by row, after the pass
                texts = [str(prompt.answer) for prompt in batch]
                answers = self.encode.tokenizer(texts, add_special_tokens=False)["input_ids"]
            encoded = self.encode.whole_of(batch)
            for prompt, answer in zip(batch, answers, strict=True):
                where = str(prompt) if source is None else source.where(prompt.index)
                try:
                    ids = next(encoded).ids
                except DataError as fault:
                    raise DataError(f"{where}: {fault}") from None
                if unknown is not None and (unknown in ids or unknown in answer):
                    text = repr(prompt.content if unknown in ids else prompt.answer)
                    self._unknown.append(f"{where}: a row with unknown characters: {shorten(text)}")
                new_tokens = len(answer) + 1 if recipe.demonstrates else recipe.rollout.max_new_tokens
                tokens = min(len(ids), self.encode.room(self.name) or len(ids))
                report.prompts += 1
                report.evaluated += is_held_out
                report.cut += tokens < len(ids)
                (self._held_out if is_held_out else self._trained).add(hash(repr(prompt.content)))
                if tokens + new_tokens <= self.context:
                    report.prompt = max(report.prompt, tokens)
                    report.answer = max(report.answer, new_tokens)
                elif self.task.too_long == "skip" and source is not None:
                    left_out.add(prompt.index)
                else:
                    total = f"{tokens} tokens + {new_tokens} of response = {tokens + new_tokens}"
                    self._too_long.append(f"{where}: a prompt of {total}")
        return frozenset(left_out)


def tokenizer_problems(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab: int | None, *, uses_chat: bool
) -> Iterator[RecipeError]:
    """Yield mismatches of recipe, tokenizer and model. `vocab` is the number of embeddings, if known."""
    width, unknown, rollout = vocab or len(tokenizer), tokenizer.unk_token_id, recipe.rollout
    if missing := _without_embedding(tokenizer, width):
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
        resize = "call model.resize_token_embeddings(len(tokenizer)) and save the model"
        yield RecipeError(
            "model.tokenizer" if recipe.model.tokenizer else "model.path",
            f"a tokenizer of {len(tokenizer):,} tokens and a model with {width:,} embeddings",
            f"an embedding for every token (none for {shown})",
            f"use the tokenizer that the model was trained with, or {resize}",
        )
    if rollout.top_k > width:
        expected = f"at most the vocabulary's {width:,} tokens"
        yield RecipeError("rollout.top_k", f"{rollout.top_k}", expected, "0 disables top_k")
    text = recipe.agent.message or MESSAGES.get(str(recipe.agent.loop), "")
    if unknown is not None and unknown in tokenizer.encode(text, add_special_tokens=False):
        found = f"unknown characters: {text!r}"
        yield RecipeError("agent.message", found, "text that the model's tokenizer can encode")
    generation = None if recipe.model.path is None else read_generation(recipe.model.path)
    try:
        stop = stop_ids(generation, tokenizer, rollout.stop)
    except RecipeError as problem:
        yield problem
    else:
        if uses_chat and tokenizer.chat_template and not recipe.demonstrates:
            yield from _turn_end(tokenizer, stop)


def hidden_tools(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a warning if chats don't show the recipe's tools to the model."""
    tools = Toolbox(recipe.agent.tools)
    if not tools.tools or not tokenizer.chat_template:
        return
    starts = SessionStart([]), SessionStart([], tools=tools.schemas)
    try:
        without, shown = (Chat(tokenizer, start, []).render([user("8+9?")]) for start in starts)
    except EngineError:  # prompts that the template refuses are named with their rows
        return
    if without == shown:
        names = ", ".join(tool.name for tool in tools.tools)
        yield (
            f"the chat template does not render tools, so the model does not see {names}: describe "
            "agent.tools in tasks.NAME.system, or use a tokenizer whose template renders them"
        )


def _without_embedding(tokenizer: PreTrainedTokenizerBase, width: int) -> list[str]:
    """Return tokens without an embedding, except special tokens that text and template never produce."""
    added, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template or "")
    ends = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token)
    special = {number for number, token in added.items() if token.special}
    missing = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= width)
    return [token for n, token in missing if n not in special or token in ends or token in template]


def _turn_end(tokenizer: PreTrainedTokenizerBase, stop: frozenset[int]) -> Iterator[RecipeError]:
    """Check that the template's end-of-turn token is a stop token. Otherwise turns never end."""
    chat = Chat(tokenizer, SessionStart([]), [])
    try:
        text = chat.render([user("8+9?"), {"role": "assistant", "content": _SAID}], ask=False)
    except EngineError:  # prompts that the template rejects are reported with their rows
        return
    _, said, rest = text.rpartition(_SAID)
    after = tokenise(tokenizer, rest)
    special = [number for number in after if number in tokenizer.added_tokens_decoder]
    if said and special and not stop & set(after):
        end = tokenizer.convert_ids_to_tokens(special[0])
        stops = ", ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(stop))))
        yield RecipeError(
            "rollout.stop",
            f"a chat template that ends turns with {end}, while sampling stops at {stops}",
            f"{end} among the stop tokens",
            f"responses would never end: set rollout.stop to ['{end}'], or the tokenizer's eos_token",
        )
