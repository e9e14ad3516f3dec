"""total:214+305+118= → 637, by way of [214+305] and [519+118] where there is a calculator"""

from __future__ import annotations

import re

from practicum.tasks.draws import Draws
from practicum.tasks.messages import Message, message_text
from practicum.tasks.procedural import Example, Option, Procedural, Settings

_SUM = re.compile(r"\d+(\+\d+)*")


def make(draws: Draws, settings: Settings) -> Example:
    count = draws.between(*settings.span("numbers"))
    low, high = settings.span("digits")
    numbers = [draws.number(draws.between(low, high)) for _ in range(count)]
    direct = draws.below(100) < settings.whole("direct")
    return Example(f"total:{'+'.join(map(str, numbers))}=", str(sum(numbers)), direct=direct)


def demonstrate(example: Example, messages: list[Message]) -> str:
    """Calls the tool for the next pair until one number is left, and answers with it.

    Asked for anything else, such as a summary, it says what is left to add, and continues from that if it
    finds it as a message of its own.
    """
    left = _numbers(example.prompt)
    for message in messages:
        text = message_text(message).strip()
        if message["role"] == "tool" and text.isdecimal():
            left = [int(text), *left[2:]]
        elif message["role"] == "user" and _SUM.fullmatch(text):
            left = _numbers(text)
    last = messages[-1]
    if last["role"] == "user" and not _asks(last, example):
        return "+".join(map(str, left))
    if example.direct:
        return example.answer
    return f"[{left[0]}+{left[1]}]" if len(left) > 1 else str(left[0])


def _asks(message: Message, example: Example) -> bool:
    """Whether the message is the task itself, or a summary to continue from."""
    text = message_text(message)
    return example.prompt in text or _SUM.fullmatch(text.strip()) is not None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


TOTAL = Procedural(
    "total",
    "Add several numbers; a tiny model needs a tool (agent: loop tool_use, tools [calculator], calls plain).",
    {
        "numbers": Option((2, 4), 2, 12, "Numbers to add."),
        "digits": Option((2, 3), 1, 12, "Digits of each number."),
        "direct": Option(0, 0, 100, "Percent of demonstrations that answer at once, without the tool."),
    },
    make,
    demonstrate=demonstrate,
)
