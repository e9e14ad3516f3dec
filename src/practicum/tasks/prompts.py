"""Prompts of the stream, their tokens, and their SFT examples."""

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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from practicum.models.processor import Processor
    from practicum.models.vision import Images


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its expected answer.

    `uid` is its position in the stream. `row` holds all columns of a file's row (empty for built-in
    tasks). `epoch` and `index` say which pass over the task and which row of it this is. `kind` and
    `example` are those of a built-in task. `step` is the training step that took it (0 in evaluations), and
    `recorded` is True if its rows are kept in the run's record.
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
    """A tokenised prompt. `messages` is None for plain text."""

    ids: list[int]
    images: Images | None
    messages: list[Message] | None


def answer_text(answer: Any) -> str:
    """Return an answer, a string or number, as text. Raise DataError for other types."""
    if isinstance(answer, str | int | float) and not isinstance(answer, bool):
        return str(answer)
    raise DataError(f"the answer is {answer!r}, expected a string or a number")


def demonstration(prompt: Prompt) -> str:
    """Return the text of an SFT example: the prompt's answer."""
    try:
        return answer_text(prompt.answer)
    except DataError as error:
        raise DataError(f"{prompt} has no SFT example: {error}") from None


def demonstrated_turn(prompt: Prompt, messages: list[Message]) -> str:
    """Return the next turn of an SFT example in a conversation with the prompt, by default the answer."""
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
    """Tokenise a prompt for sampling, and open its images.

    Messages, and strings with `chat`, use the tokenizer's chat template with the schemas of `tools`, and the
    `system` message unless they have one. Other strings are tokenised with the BOS if the tokenizer adds it.
    Images need the model's `processor`.
    """
    if isinstance(prompt.content, str) and not chat:
        return encode_texts([prompt], tokenizer)[0]
    messages = chat_messages(prompt.content, system)
    ids = _encode_chat(prompt, messages, tokenizer, tools)
    ids, images = _place_images(prompt, ids, processor)
    return Encoded(_check_ids(prompt, ids), images, messages)


def encode_texts(prompts: Sequence[Prompt], tokenizer: Any) -> list[Encoded]:
    """Tokenise plain-text prompts in one call, equal texts once."""
    texts = list(dict.fromkeys(prompt_text(prompt.content) for prompt in prompts))
    if not texts:
        return []
    all_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    # Add only the BOS. Some tokenizers also add an EOS, after which nothing can follow.
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
    """Encodes prompts with their tasks' chat settings, the agent's tools and the model's processor."""

    tasks: Mapping[str, Task]
    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Mapping[str, Any]] = ()
    processor: Processor | None = None
    most_tokens: int | None = None
    """Maximum tokens of a prompt with `too_long: cut`."""

    def __call__(self, prompt: Prompt) -> Encoded:
        """Encode a prompt. If it is cut, keep its last tokens."""
        encoded, room = next(self.whole_of([prompt])), self.room(prompt.task)
        if room is None or len(encoded.ids) <= room or encoded.messages is not None:
            return encoded
        return replace(encoded, ids=encoded.ids[-room:])

    def room(self, task: str) -> int | None:
        """Return the length to which plain-text prompts of this task are cut, or None."""
        return self.most_tokens if self.tasks[task].too_long == "cut" and not self.tasks[task].chat else None

    def whole_of(self, prompts: Sequence[Prompt]) -> Iterator[Encoded]:
        """Encode prompts without cutting, with plain texts tokenised in one call."""
        plain = [p for p in prompts if isinstance(p.content, str) and not self.tasks[p.task].chat]
        texts = {
            id(p): encoded for p, encoded in zip(plain, encode_texts(plain, self.tokenizer), strict=True)
        }
        tools, processor = self.tools or None, self.processor
        for prompt in prompts:
            task = self.tasks[prompt.task]
            yield texts.get(id(prompt)) or encode_prompt(
                prompt, self.tokenizer, task.chat, task.system, tools=tools, processor=processor
            )


def _check_ids(prompt: Prompt, ids: list[int]) -> list[int]:
    if not ids:
        raise PracticumError(f"{prompt} has no tokens: its text is {prompt_text(prompt.content)!r}")
    return ids


def chat_messages(content: Content, system: str | None) -> list[Message]:
    """Return a prompt as a conversation, with the `system` message unless it has one."""
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
    shown: Any = list(tools) if tools else None
    try:
        ids = tokenizer.apply_chat_template(
            messages, tools=shown, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:
        # Templates reject unknown roles with an error of the template engine.
        roles = ", ".join(message["role"] for message in messages)
        raise PracticumError(
            f"{prompt}: the chat template refused its messages ({roles}): {error}"
        ) from error
    return [int(i) for i in ids]


def _place_images(
    prompt: Prompt, ids: list[int], processor: Processor | None
) -> tuple[list[int], Images | None]:
    """Return the ids with as many image tokens as each image needs, and the images, or None without any."""
    sources = [part["image"] for part in image_parts(prompt.content)]
    if processor is None and sources:
        found = f"a model that is not a vision model, and {prompt} has {len(sources)} images"
        fix = f"use one, such as model.random_init.family: qwen2_5_vl, or remove tasks.{prompt.task}."
        raise RecipeError("model.path", found, "a vision model", fix)
    if processor is None:
        return ids, None
    from practicum.models.processor import encode_images, expand_images

    places = ids.count(processor.image_token_id)
    if places != len(sources):
        raise DataError(
            f"{prompt} has {len(sources)} images, and the chat template made {places} places for them; "
            f"a text must not say {processor.image_token}, and a template must place images"
        )
    if not sources:
        return ids, None
    try:
        images, counts = encode_images(processor, [open_picture(source) for source in sources])
    except (DataError, ValueError) as error:  # ValueError: of a shape that the model can't take
        raise DataError(f"{prompt}: {error}") from error
    return expand_images(ids, processor.image_token_id, counts), images
