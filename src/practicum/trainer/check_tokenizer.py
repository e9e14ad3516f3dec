"""What the tokenizer, the model's config and the recipe must agree on: token ids, stop tokens, top-k."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from practicum.errors import EngineError, RecipeError
from practicum.models.load_model import stop_ids
from practicum.models.model_files import read_generation
from practicum.recipe.derived import is_supervised
from practicum.recipe.schema.recipe import Recipe
from practicum.sessions.chat import Chat, SessionStart, tokenise
from practicum.tasks.messages import user

_SHOWN = 3
_SAID = "17"
"""A turn of the assistant that templates leave as it is."""


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer in a sentence."""
    chat = "a chat template" if tokenizer.chat_template else "no chat template"
    end, pad = tokenizer.eos_token, tokenizer.pad_token
    return f"tokenizer: {len(tokenizer):,} tokens, end {end}, padding {pad}, {chat}"


def tokenizer_problems(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab: int | None, *, uses_chat: bool
) -> Iterator[RecipeError]:
    """Everything in which they disagree. `vocab` is the number of the model's embeddings, if known."""
    width = vocab or len(tokenizer)
    yield from _embeddings(recipe, tokenizer, width)
    if recipe.rollout.top_k > width:
        found, expected = f"{recipe.rollout.top_k}", f"at most the vocabulary's {width:,} tokens"
        yield RecipeError("rollout.top_k", found, expected, "0 keeps all of them")
    yield from _agent_texts(recipe, tokenizer)
    generation = None if recipe.model.path is None else read_generation(recipe.model.path)
    try:
        stop = stop_ids(generation, tokenizer, recipe.rollout.stop)
    except RecipeError as problem:
        yield problem
        return
    if uses_chat and tokenizer.chat_template and not is_supervised(recipe):
        yield from _turn_end(tokenizer, stop)


def _embeddings(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, width: int) -> Iterator[RecipeError]:
    """Tokens without an embedding, but for special ones that neither text nor template can bring up."""
    known, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template or "")
    ends = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token)
    missing = [
        token
        for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        if number >= width
        and not (number in known and known[number].special and token not in ends and token not in template)
    ]
    if missing:
        key = "model.tokenizer" if recipe.model.tokenizer else "model.path"
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
        resize = "call model.resize_token_embeddings(len(tokenizer)) and save the model"
        yield RecipeError(
            key,
            f"a tokenizer of {len(tokenizer):,} tokens and a model with {width:,} embeddings",
            f"an embedding for every token (none for {shown})",
            f"use the tokenizer that the model was trained with, or {resize}",
        )


def _agent_texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[RecipeError]:
    """What the loop tells the model must be something that the model can read."""
    agent, unknown = recipe.agent, tokenizer.unk_token_id
    for key in {"compress": ["ask_summary"], "retry": ["feedback"]}.get(agent.loop, []):
        text = getattr(agent, key)
        if unknown is not None and unknown in tokenizer.encode(text, add_special_tokens=False):
            found = f"unknown characters: {text!r}"
            yield RecipeError(f"agent.{key}", found, "a text that the model's tokenizer can write")


def _turn_end(tokenizer: PreTrainedTokenizerBase, stop: frozenset[int]) -> Iterator[RecipeError]:
    """A turn that the template ends with a special token must stop at it, or answers never end."""
    chat = Chat(tokenizer, SessionStart([]), [])
    try:
        text = chat.render([user("8+9?"), {"role": "assistant", "content": _SAID}], ask=False)
    except EngineError:  # prompts that the template refuses are named with their rows
        return
    _, said, rest = text.rpartition(_SAID)
    after = tokenise(tokenizer, rest)
    special = [number for number in after if number in tokenizer.added_tokens_decoder]
    if said and special and not stop & set(after):
        end = tokenizer.convert_ids_to_tokens(special[0])
        stops = ", ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(stop))))
        yield RecipeError(
            "rollout.stop",
            f"a chat template that ends turns with {end}, and answers that stop at {stops}",
            f"{end} among the stop tokens",
            f"answers would never end: set rollout.stop to ['{end}'], or eos_token in the tokenizer's config",
        )
