"""A prompt of the stream, how it becomes tokens, and what a demonstrator would say to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from practicum.errors import DataError, PracticumError, RecipeError
from practicum.recipe.schema.recipe import Task
from practicum.tasks.builtin import find_kind
from practicum.tasks.messages import Content, Message, image_parts, prompt_text
from practicum.tasks.pictures import open_picture
from practicum.tasks.procedural import Example
from practicum.user_code import lone_surrogate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from practicum.models.images import Images
    from practicum.models.processor import Processor


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: who it is, what it says and what a right answer would be.

    `uid` is its position in the stream. `row` holds all columns of a file's row (empty for built-in
    tasks); `epoch` and `index` say which pass over the task and which row of it this is. `kind` and
    `example` are those of a built-in task. `step` is the training step that took it (0 in evaluations), and
    `recorded` whether its rows are kept in the run's record.
    """

    uid: int
    task: str
    domain: str
    content: Content
    answer: Any
    row: Mapping[str, Any]
    epoch: int
    index: int
    kind: str | None = None
    example: Example | None = field(default=None, repr=False)
    step: int = 0
    recorded: bool = False

    def __str__(self) -> str:
        return f"prompt {self.uid} (task {self.task}, epoch {self.epoch}, row {self.index})"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as the model reads it. `messages` are those of a chat, None for plain text."""

    ids: list[int]
    images: Images | None
    messages: list[Message] | None


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


def demonstrated_turn(prompt: Prompt, messages: list[Message]) -> str:
    """What a demonstrator would say next in a conversation that began with the prompt; else its answer."""
    if prompt.kind is None or prompt.example is None:
        return demonstration(prompt)
    return find_kind(prompt.kind, prompt.task).demonstrate(prompt.example, messages)


def encode_prompt(
    prompt: Prompt,
    tokenizer: Any,
    chat: bool,
    system: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    processor: Processor | None = None,
) -> Encoded:
    """The prompt's tokens, ready to be continued, and its pictures, which are opened here.

    Messages, and strings if `chat`, go through the tokenizer's chat template with the schemas of the
    `tools`, after the `system` message unless they bring their own. Other strings are tokenised as they
    are, after the BOS if the tokenizer puts one. Pictures need the model's `processor`.
    """
    if isinstance(prompt.content, str) and not chat:
        return encode_texts([prompt], tokenizer)[0]
    _check_text(prompt, system or "")
    messages = chat_messages(prompt.content, system)
    ids = _encode_chat(prompt, messages, tokenizer, tools)
    ids, images = _place_pictures(prompt, ids, processor)
    return Encoded(_check_ids(prompt, ids), images, messages)


def encode_texts(prompts: Sequence[Prompt], tokenizer: Any) -> list[Encoded]:
    """Prompts that are plain text, all tokenised in one call: equal texts once."""
    for prompt in prompts:
        _check_text(prompt)
    texts = list(dict.fromkeys(prompt_text(prompt.content) for prompt in prompts))
    if not texts:
        return []
    all_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    # Only the BOS is wanted: some tokenizers also close the text, and nothing follows a closed one.
    adds_bos = bos is not None and tokenizer("a", add_special_tokens=True)["input_ids"][0] == bos
    first = [bos] if adds_bos else []
    ids_of = {
        text: list(ids) if ids[:1] == first else [*first, *ids]
        for text, ids in zip(texts, all_ids, strict=True)
    }
    return [
        Encoded(list(_check_ids(prompt, ids_of[prompt_text(prompt.content)])), None, None)
        for prompt in prompts
    ]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes prompts by their tasks' chat settings, with the agent's tools and the model's processor."""

    tasks: Mapping[str, Task]
    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Mapping[str, Any]] = ()
    processor: Processor | None = None
    most_tokens: int | None = None
    """Tokens that a prompt may have, where its task says `too_long: cut`."""

    def __call__(self, prompt: Prompt) -> Encoded:
        """The prompt's tokens, pictures and messages; of a prompt that is to be cut, the last tokens."""
        encoded, room = self.whole(prompt), self.room(prompt.task)
        if room is None or len(encoded.ids) <= room or encoded.messages is not None:
            return encoded
        return replace(encoded, ids=encoded.ids[-room:])

    def room(self, task: str) -> int | None:
        """Tokens that prompts of this task are cut to, if they are plain text; None if they are not cut."""
        return self.most_tokens if self.tasks[task].too_long == "cut" and not self.tasks[task].chat else None

    def whole_of(self, prompts: Sequence[Prompt]) -> Iterator[Encoded]:
        """As `whole`, with the plain texts tokenised in one call, which takes a fraction of the time."""
        plain = [p for p in prompts if isinstance(p.content, str) and not self.tasks[p.task].chat]
        texts = iter(encode_texts(plain, self.tokenizer))
        is_plain = {id(p) for p in plain}
        return (next(texts) if id(p) in is_plain else self.whole(p) for p in prompts)

    def whole(self, prompt: Prompt) -> Encoded:
        """The prompt as it is, however long."""
        task = self.tasks[prompt.task]
        return encode_prompt(
            prompt,
            self.tokenizer,
            chat=task.chat,
            system=task.system,
            tools=self.tools or None,
            processor=self.processor,
        )


def _check_text(prompt: Prompt, system: str = "") -> None:
    if broken := lone_surrogate(f"{system}{prompt_text(prompt.content)}"):
        raise DataError(f"{prompt}: its text has {broken}, which no tokenizer takes")


def _check_ids(prompt: Prompt, ids: list[int]) -> list[int]:
    if not ids:
        raise PracticumError(f"{prompt} has no tokens: its text is {prompt_text(prompt.content)!r}")
    return ids


def chat_messages(content: Content, system: str | None) -> list[Message]:
    """A prompt as a conversation, after the `system` message unless it brings its own."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _encode_chat(
    prompt: Prompt, messages: list[Message], tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    if not tokenizer.chat_template:
        raise PracticumError(
            f"{prompt} is a chat, and the tokenizer has no chat template.\n"
            f"  → use strings with tasks.{prompt.task}.chat: false, or a tokenizer that has one."
        )
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except Exception as error:
        # Templates refuse roles they do not know with an error of the template engine.
        roles = ", ".join(message["role"] for message in messages)
        raise PracticumError(
            f"{prompt}: the chat template refused its messages ({roles}): {error}"
        ) from error
    return [int(i) for i in ids]


def _place_pictures(
    prompt: Prompt, ids: list[int], processor: Processor | None
) -> tuple[list[int], Images | None]:
    """The ids with as many image tokens as each picture needs, and the pictures; None without any."""
    sources = [part["image"] for part in image_parts(prompt.content)]
    if processor is None:
        if sources:
            raise _no_vision_model(prompt, len(sources))
        return ids, None
    from practicum.models.processor import encode_images, expand_images

    places = ids.count(processor.image_token_id)
    if places != len(sources):
        raise DataError(
            f"{prompt} has {len(sources)} pictures, and the chat template made {places} places for them; "
            f"a text must not say {processor.image_token}, and a template must place pictures"
        )
    if not sources:
        return ids, None
    try:
        images, counts = encode_images(processor, [open_picture(source) for source in sources])
    except (DataError, ValueError) as error:  # ValueError: of a shape that the model can't take
        raise DataError(f"{prompt}: {error}") from error
    return expand_images(ids, processor.image_token_id, counts), images


def _no_vision_model(prompt: Prompt, pictures: int) -> RecipeError:
    return RecipeError(
        "model.path",
        f"a model that is not a vision model, and {prompt} has {pictures} pictures",
        "a vision model",
        f"use one (a tiny one: model.make.family: qwen2_5_vl), or leave tasks.{prompt.task} out.",
    )
