"""How prompts and conversations become tokens.

A chat template is a function of all messages. So for each turn it is asked for the longer conversation, and
what that adds to the text that is already there is appended: nothing is tokenised twice. Where the template
rewrites that text, there is nothing to append.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A prompt as the model gets it; `messages` (the system's too) is None for a plain-text prompt.

    `tools` are the schemas that the chat template shows to the model, `options` are further arguments of it.
    """

    ids: list[int]
    images: Images | None = None
    messages: list[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = field(default=())
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """The turn that is open: what the model wrote, and the text of the stop token that ended it, if any."""

    content: str = ""
    end: str = ""

    def messages(self) -> list[Message]:
        """The turn as a message; none for a turn that has nothing yet."""
        return [{"role": "assistant", "content": self.content}] if self.content or self.end else []


class PlainFormat:
    """A plain-text prompt, after which messages are written between bars: `|42|`.

    `extend` returns the text between the open turn, which follows `messages`, and the next turn, which
    follows `new`; None if the text that is there would have to change. `open` returns the tokens of a
    conversation up to the model's turn; those of the prompt stay as they are if it begins with the prompt.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, start: SessionStart, opening: list[Message]
    ) -> None:
        self._tokenizer, self._start, self._opening = tokenizer, start, opening

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
    """Messages through the tokenizer's chat template, with the tools' schemas; methods as of PlainFormat."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, start: SessionStart, opening: list[Message]
    ) -> None:
        self._tokenizer, self._start, self._opening = tokenizer, start, opening

    def extend(self, messages: Sequence[Message], written: WrittenTurn, new: Sequence[Message]) -> str | None:
        if not messages:
            raise SessionError(
                "a trajectory that was opened with tokens continues with tokens, not with messages"
            )
        there = self.render(messages) + written.content + written.end
        longer = self.render([*messages, *written.messages(), *new])
        return longer[len(there) :] if longer.startswith(there) else None

    def open(self, messages: Sequence[Message]) -> list[int]:
        text = self.render(messages)
        if self._start.images is None or not begins_with(messages, self._opening):
            return tokenise(self._tokenizer, text)
        # A picture's place in the text is one token, and as many as the picture needs in the prompt.
        before = self.render(self._opening, ask=False)
        asking = tokenise(self._tokenizer, self.render(self._opening).removeprefix(before))
        kept = len(self._start.ids) - len(asking)
        if not text.startswith(before) or self._start.ids[kept:] != asking:
            raise EngineError(
                "the chat template rewrites a prompt with pictures, which can't be opened again"
            )
        return [*self._start.ids[:kept], *tokenise(self._tokenizer, text.removeprefix(before))]

    def render(self, messages: Sequence[Message], *, ask: bool = True) -> str:
        """The conversation as text; unless `ask` is false, up to where the model's turn begins."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in self._start.tools] or None,
                add_generation_prompt=ask,
                tokenize=False,
                **self._start.options,
            )
        except Exception as error:
            # Templates refuse roles they do not know with an error of the template engine.
            roles = ", ".join(str(message["role"]) for message in messages)
            raise EngineError(f"the chat template refused a conversation ({roles}): {error}") from error
        return str(text)


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, nothing put around it."""
    return [int(i) for i in tokenizer(encodable(text), add_special_tokens=False)["input_ids"]] if text else []


def read(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, specials: bool) -> str:
    """The text of tokens as it is; with or without special tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=not specials, clean_up_tokenization_spaces=False)
    return str(text)


def begins_with(messages: Sequence[Message], opening: Sequence[Message]) -> bool:
    return list(messages[: len(opening)]) == list(opening)


def check_messages(messages: Sequence[Any]) -> list[Message]:
    """Messages that a session may continue with: role and text; pictures belong to the prompt."""
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise SessionError(f"found {short_repr(message)} among messages, expected role and content")
        content = message["content"]
        parts = content if isinstance(content, list) else []
        is_text = all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)
        if not isinstance(content, str | list) or not is_text:
            raise SessionError(
                f"a {message['role']} message after the prompt holds something else than text: pictures can "
                "be part of the prompt only"
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
    """The encoder of a recipe's prompts; tools and processors that can't be had are RecipeErrors."""
    toolbox = Toolbox(recipe.agent.tools)
    processor = load_processor(recipe.model, tokenizer)
    most_tokens = None
    if any(task.too_long == "cut" for task in recipe.tasks.values()):
        model_context, _ = model_facts(recipe.model, len(tokenizer))
        most_tokens = max(1, recipe.rollout.context_for(model_context) - recipe.rollout.max_new_tokens)
    return Encoder(recipe.tasks, tokenizer, toolbox.schemas, processor, most_tokens)
