"""Turn prompts and conversations into tokens.

A chat template is a function of all messages. For each turn, the longer conversation is rendered, and the
text that follows the existing text is appended, so nothing is tokenised twice. If the template rewrites the
existing text, nothing can be appended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from practicum.errors import EngineError, SessionError
from practicum.models.load_model import model_facts
from practicum.models.processor import load_processor
from practicum.models.vision import Images
from practicum.recipe.schema.recipe import Recipe
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import Message, message_text
from practicum.tasks.prompts import Encoder
from practicum.user_code import encodable, short_repr

THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
"""A thought at the start of a turn. Its opening tag may be missing."""


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A prompt in the model's format. `messages` is None for plain text, `options` are the template's."""

    ids: list[int]
    images: Images | None = None
    messages: list[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = field(default=())
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """The open turn: its text, its stop token's, and the tag of a thought that the template opened."""

    content: str = ""
    end: str = ""
    thought: str = ""
    split: bool = False
    """True to write a thought as `reasoning_content`, where some templates look for it."""

    def messages(self) -> list[Message]:
        """Return the turn as a message, or nothing for an empty turn."""
        if not (self.content or self.end):
            return []
        message: Message = {"role": "assistant", "content": self.thought + self.content}
        if self.split and (thought := THOUGHT.match(message["content"])):
            message |= {
                "content": message["content"][thought.end() :],
                "reasoning_content": thought[1].strip(),
            }
        return [message]


class PlainFormat:
    """A plain-text prompt, followed by messages between bars, as in `|42|`.

    `extend` returns the text between the open turn, which follows `messages`, and the next turn, which
    follows `new`, or None if existing text would have to change. `open` returns the tokens of a conversation
    up to the model's turn, and reuses the prompt's tokens if it begins with the prompt.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, start: SessionStart, opening: list[Message]
    ) -> None:
        self._tokenizer, self._start, self._opening = tokenizer, start, opening

    thought = ""

    def extend(self, messages: Sequence[Message], written: WrittenTurn, new: Sequence[Message]) -> str | None:
        return "".join(_between_bars(message) for message in new)

    def open(self, messages: Sequence[Message]) -> list[int]:
        if begins_with(messages, self._opening):
            later = self.extend(self._opening, WrittenTurn(), messages[len(self._opening) :])
            return [*self._start.ids, *tokenise(self._tokenizer, later or "")]
        first, *rest = messages
        text = f"{message_text(first)}{self.extend([first], WrittenTurn(), rest)}"
        first_id = self._start.ids[0]
        bos = [first_id] if first_id == self._tokenizer.bos_token_id else []
        return [*bos, *tokenise(self._tokenizer, text)]


class Chat:
    """Messages in the tokenizer's chat template, with the tools' schemas. Has the methods of PlainFormat."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, start: SessionStart, opening: list[Message]
    ) -> None:
        self._tokenizer, self._start, self._opening = tokenizer, start, opening

    @cached_property
    def thought(self) -> str:
        """The opening tag of a thought, if the template writes one before each turn."""
        asking = self.render(self._opening).removeprefix(self.render(self._opening, ask=False))
        _, tag, rest = asking.rpartition("<think>")
        return "" if "</think>" in rest else tag + rest if tag else ""

    def extend(self, messages: Sequence[Message], written: WrittenTurn, new: Sequence[Message]) -> str | None:
        if not messages:
            raise SessionError("a trajectory opened with tokens must be continued with tokens, not messages")
        there = self.render(messages) + written.content + written.end
        longer = self.render([*messages, *written.messages(), *new])
        if not longer.startswith(there):
            return None
        added = longer[len(there) :]
        for i, message in enumerate(new):
            is_shown = message_text(message).strip() in added  # if not, it is written differently or left out
            if not is_shown and longer == self.render(
                [*messages, *written.messages(), *new[:i], *new[i + 1 :]]
            ):
                raise EngineError(
                    f"the chat template leaves out a {message['role']} message: it may show results only of "
                    "calls in its own format. Use another template, or send results as user messages"
                )
        return added

    def open(self, messages: Sequence[Message]) -> list[int]:
        text = self.render(messages)
        if self._start.images is None or not begins_with(messages, self._opening):
            return tokenise(self._tokenizer, text)
        # An image is one token in the text, and expanded to its number of tokens in the prompt.
        before = self.render(self._opening, ask=False)
        asking = tokenise(self._tokenizer, self.render(self._opening).removeprefix(before))
        kept = len(self._start.ids) - len(asking)
        if not text.startswith(before) or self._start.ids[kept:] != asking:
            raise EngineError("the chat template rewrites a prompt with images, which can't be reopened")
        return [*self._start.ids[:kept], *tokenise(self._tokenizer, text.removeprefix(before))]

    def render(self, messages: Sequence[Message], *, ask: bool = True) -> str:
        """Render the conversation as text, with `ask` up to the start of the model's turn."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in self._start.tools] or None,
                add_generation_prompt=ask,
                tokenize=False,
                **self._start.options,
            )
        except Exception as error:
            # Templates reject unknown roles with an error of the template engine.
            roles = ", ".join(str(message["role"]) for message in messages)
            raise EngineError(f"the chat template refused a conversation ({roles}): {error}") from error
        return str(text)


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise a text without adding special tokens."""
    return [int(i) for i in tokenizer(encodable(text), add_special_tokens=False)["input_ids"]] if text else []


def read(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, specials: bool) -> str:
    """Decode tokens, with or without special tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=not specials, clean_up_tokenization_spaces=False)
    return str(text)


def begins_with(messages: Sequence[Message], opening: Sequence[Message]) -> bool:
    return list(messages[: len(opening)]) == list(opening)


def check_messages(messages: Sequence[Any]) -> list[Message]:
    """Check messages that continue a session: role and text. Images are allowed in the prompt only."""
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise SessionError(f"found {short_repr(message)} among messages, expected role and content")
        content = message["content"]
        parts = content if isinstance(content, list) else []
        is_text = all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)
        if not isinstance(content, str | list) or not is_text:
            raise SessionError(
                f"a {message['role']} message after the prompt has content that is not text: images are "
                "allowed in the prompt only"
            )
    return [dict(message) for message in messages]


def _between_bars(message: Message) -> str:
    if message["role"] not in ("user", "tool"):
        raise SessionError(
            f"a plain-text prompt continues with text, user and tool messages, not with a {message['role']} "
            "message: set the task's chat to true"
        )
    return f"|{message_text(message)}|"


def make_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return the encoder of a recipe's prompts. Raise RecipeError for unavailable tools and processors."""
    toolbox = Toolbox(recipe.agent.tools)
    processor = load_processor(recipe.model, tokenizer)
    most_tokens = None
    if any(task.too_long == "cut" for task in recipe.tasks.values()):
        model_context, _ = model_facts(recipe.model, len(tokenizer))
        most_tokens = max(1, recipe.rollout.context_for(model_context) - recipe.rollout.max_new_tokens)
    return Encoder(recipe.tasks, tokenizer, toolbox.schemas, processor, most_tokens)
