"""A prompt of the stream, and how it becomes tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from practicum.errors import DataError, PracticumError

Content = str | list[dict[str, Any]]
"""What a prompt says: plain text, or chat messages with role and content."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: who it is, what it says and what a right answer would be.

    `uid` is its position in the stream. `row` holds all columns of a file's row (empty for built-in
    tasks); `epoch` and `index` say which pass over the task and which row of it this is.
    """

    uid: int
    task: str
    domain: str
    content: Content
    answer: Any
    row: Mapping[str, Any]
    epoch: int
    index: int

    def __str__(self) -> str:
        return f"prompt {self.uid} (task {self.task}, epoch {self.epoch}, row {self.index})"


def prompt_text(content: Content) -> str:
    """The prompt as people read it; messages one per line with their role."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{message['role']}: {message['content']}" for message in content)


def answer_text(answer: Any) -> str:
    """An answer as text: strings as they are, numbers written out; anything else is a DataError."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    raise DataError(f"the answer is {answer!r}, expected a string or a number")


def demonstration(prompt: Prompt) -> str:
    """The text a student is shown in supervised training: the prompt's answer."""
    try:
        return answer_text(prompt.answer)
    except DataError as error:
        raise DataError(f"{prompt} can't be demonstrated: {error}") from None


def encode_prompt(prompt: Prompt, tokenizer: Any, chat: bool, system: str | None) -> list[int]:
    """The prompt's token ids, ready to be continued.

    Messages, and strings if `chat`, go through the tokenizer's chat template, after the `system`
    message unless they bring their own. Other strings are tokenised as they are, behind the BOS if
    the tokenizer puts one.
    """
    if isinstance(prompt.content, str) and not chat:
        ids = _encode_plain(prompt.content, tokenizer)
    else:
        ids = _encode_chat(prompt, tokenizer, system)
    if not ids:
        raise PracticumError(f"{prompt} has no tokens: its text is {prompt_text(prompt.content)!r}")
    return ids


def _encode_plain(text: str, tokenizer: Any) -> list[int]:
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    bos = tokenizer.bos_token_id
    if bos is None or ids[:1] == [bos]:
        return ids
    # Only the BOS is wanted: some tokenizers also close the text, and nothing follows a closed one.
    adds_bos = tokenizer("a", add_special_tokens=True)["input_ids"][0] == bos
    return [int(bos), *ids] if adds_bos else ids


def _encode_chat(prompt: Prompt, tokenizer: Any, system: str | None) -> list[int]:
    if not tokenizer.chat_template:
        raise PracticumError(
            f"{prompt} is a chat, and the tokenizer has no chat template.\n"
            f"  → use strings with tasks.{prompt.task}.chat: false, or a tokenizer that has one."
        )
    content = prompt.content
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:
        # Templates refuse roles they do not know with an error of the template engine.
        roles = ", ".join(message["role"] for message in messages)
        raise PracticumError(
            f"{prompt}: the chat template refused its messages ({roles}): {error}"
        ) from error
    return [int(i) for i in ids]
