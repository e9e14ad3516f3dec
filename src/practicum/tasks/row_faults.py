"""What a row of a dataset file must look like, and what its prompt says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from practicum.tasks.messages import Content, image_parts, message_text, picture_message, prompt_text
from practicum.user_code import lone_surrogate, repr_of, type_name

_ROLES = ("system", "developer", "user", "assistant", "tool")


_LIKELY = {
    "prompt": ("question", "problem", "instruction", "input", "query", "messages", "conversation", "text"),
    "answer": ("solution", "output", "target", "response", "completion", "final_answer", "label"),
}
"""Names that other people give to the columns."""


def find_fault(
    row: Any,
    prompt_column: str,
    answer_column: str,
    needs_answer: bool,
    images_column: str = "images",
    task: str = "<name>",
) -> str | None:
    """What is wrong with a row, in words; None if it is good."""
    if not isinstance(row, dict):
        return f"a row is an object with named columns, this is {_named(row)}"
    if prompt_column not in row:
        fault = _missing(row, prompt_column, "prompt", task)
        if needs_answer and answer_column not in row and (likely := _likely(row, "answer")):
            fault += f"{' and' if _likely(row, 'prompt') else '; set'} tasks.{task}.answer: {likely}"
        return fault
    prompt = row[prompt_column]
    fault = _prompt_fault(prompt) or _text_fault("prompt", prompt_text(prompt))
    if fault:
        return f"column {prompt_column!r}: {fault}"
    fault = _pictures_fault(row[prompt_column], row.get(images_column))
    if fault:
        return f"column {images_column!r}: {fault}"
    if needs_answer:
        if answer_column not in row:
            return _missing(row, answer_column, "answer", task)
        fault = _answer_fault(row[answer_column])
        if fault:
            return f"column {answer_column!r}: {fault}"
    return None


def row_content(row: Mapping[str, Any], prompt_column: str, images_column: str, folder: Path) -> Content:
    """The prompt of a good row. Pictures stand before a string, and in messages where they have places;
    their paths start from the folder."""
    prompt, paths = row[prompt_column], row.get(images_column) or []
    if isinstance(prompt, str):
        return [picture_message([str(folder / path) for path in paths], prompt)] if paths else prompt
    left = iter(paths)
    return [_filled(message, left, folder) for message in prompt]


def _filled(message: dict[str, Any], paths: Iterator[str], folder: Path) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return message
    parts = [
        {**part, "image": str(folder / (part["image"] if "image" in part else next(paths)))}
        if part["type"] == "image"
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _likely(row: Mapping[str, Any], role: str) -> str | None:
    return next((name for name in _LIKELY[role] if name in row), None)


def _missing(row: Mapping[str, Any], column: str, role: str, task: str) -> str:
    hint = ""
    if likely := _likely(row, role):
        hint = f"; set tasks.{task}.{role}: {likely}"
    elif len(row) == 1 and any(mark in next(iter(row)) for mark in ";\t|"):
        hint = "; columns of a CSV file are separated by commas"
    elif near := get_close_matches(column, row, n=1):
        hint = f"; did you mean {near[0]!r}?"
    return f"no column {column!r} for the {role}, only {', '.join(map(repr, row)) or 'none'}{hint}"


def _prompt_fault(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "the prompt is empty"
    if not isinstance(prompt, list):
        return f"a prompt is a string or a list of messages, this is {_named(prompt)}"
    if not prompt:
        return "the prompt has no messages"
    for n, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            return f"message {n} is {_named(message)}, expected an object with role and content"
        if message.get("role") not in _ROLES:
            return f"message {n} has role {message.get('role')!r}, expected {', '.join(_ROLES)}"
        fault = _content_fault(message.get("content"))
        if fault:
            return f"message {n} has {fault}"
    if prompt[-1]["role"] == "assistant":
        return "the last message is the assistant's own, so nothing is left to answer"
    if not any(message_text(message).strip() for message in prompt):
        return "every message is empty"
    return None


def _content_fault(content: Any) -> str | None:
    if isinstance(content, str):
        return None
    if not isinstance(content, list) or not content:
        return f"content {_named(content)}, expected a string or a list of parts"
    for n, part in enumerate(content, start=1):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if kind == "image" and isinstance(part.get("image", ""), str):
            continue
        return f'part {n} {_named(part)}, expected {{"type": "text", "text": …}} or {{"type": "image"}}'
    return None


def _pictures_fault(prompt: Any, paths: Any) -> str | None:
    """What is wrong with a row's pictures, if its prompt is good."""
    paths = [] if paths is None else paths
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        return f"pictures are a list of paths, this is {_named(paths)}; tasks.<name>.images names the column"
    if isinstance(prompt, str):
        return None
    places = sum("image" not in part for part in image_parts(prompt))
    if places == len(paths):
        return None
    return (
        f'{len(paths)} pictures for {places} places; each needs one {{"type": "image"}} without a path '
        "among the parts of a message's content"
    )


def _answer_fault(answer: Any) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"an answer is a string or a number, this is {_named(answer)}"
    if isinstance(answer, str) and not answer.strip():
        return "the answer is empty"
    return _text_fault("answer", answer) if isinstance(answer, str) else None


def _text_fault(what: str, text: str) -> str | None:
    broken = lone_surrogate(text)
    return f"the {what} has {broken}, which no tokenizer takes" if broken else None


def _named(value: Any) -> str:
    if value is None:
        return "null"
    shown = repr_of(value, 10_000)
    return f"{type_name(value)} {shown if len(shown) <= 40 else shown[:37] + '...'}"
