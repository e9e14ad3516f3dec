"""Chat messages: a role and a content, which is text or a list of parts: texts and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]
"""{"role": …, "content": …}; a part is {"type": "text", "text": …} or {"type": "image", "image": …}."""

Content = str | list[Message]
"""What a prompt says: plain text, or chat messages."""

PICTURE = "[picture]"
"""How texts for people show an image."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool_result(name: str, text: str) -> Message:
    return {"role": "tool", "name": name, "content": text}


def picture_message(pictures: Sequence[Any], text: str) -> Message:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def image_parts(content: Content) -> Iterator[dict[str, Any]]:
    """Yield the parts that are images, in the order in which they are read."""
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
    """Return the prompt as people read it; messages one per line with their role."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{message['role']}: {message_text(message)}" for message in content)
