"""Chat messages: a role, and content that is text or a list of text and image parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]
"""{"role": …, "content": …}; a part is {"type": "text", "text": …} or {"type": "image", "image": …}."""

Content = str | list[Message]
"""Content of a prompt: plain text, or chat messages."""

PICTURE = "[picture]"
"""Placeholder of an image in text for people."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool_result(name: str, text: str) -> Message:
    return {"role": "tool", "name": name, "content": text}


def picture_message(pictures: Sequence[Any], text: str) -> Message:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def image_parts(content: Content) -> Iterator[dict[str, Any]]:
    """Yield the image parts in order."""
    if isinstance(content, str):
        return
    for message in content:
        if not isinstance(message["content"], str):
            yield from (part for part in message["content"] if part["type"] == "image")


def message_text(message: Message) -> str:
    """Return the text of a message, with each image as [picture]."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(PICTURE if part["type"] == "image" else part["text"] for part in content)


def prompt_text(content: Content) -> str:
    """Return the prompt as text for people, with one message per line and its role."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{message['role']}: {message_text(message)}" for message in content)
