"""The built-in tasks on text. Prompts name their task and end with "=".

copy:bead= → bead, reverse:bead= → daeb, rotate:bead= → eadb, count:a,cabadab= → 3, sort:4291= → 1249,
add:47+52= → 99, compare:47,52= → <, countdown:a2= → a2 a1 a0, and total:214+305+118= → 637, by way of
[214+305] and [519+118] where there is a calculator. All use the characters of the tiny tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from string import ascii_lowercase

from practicum.tasks.draws import Draws
from practicum.tasks.messages import Message, message_text
from practicum.tasks.procedural import Example, Option, Procedural, Settings


def _options(about: str, length: tuple[int, int] = (4, 8), letters: int = 26) -> dict[str, Option]:
    return {
        "length": Option(length, 1, 200, about),
        "letters": Option(letters, 1, 26, "Size of the alphabet, from a on."),
    }


def _word(draws: Draws, settings: Settings) -> str:
    alphabet = ascii_lowercase[: settings.whole("letters")]
    return draws.text(alphabet, draws.between(*settings.span("length")))


def _changed_word(name: str, about: str, letters: str, change: Callable[[str], str]) -> Procedural:
    """The kind whose answer is a word that was changed; `letters` says what its letters are for."""

    def make(draws: Draws, settings: Settings) -> Example:
        word = _word(draws, settings)
        return Example(f"{name}:{word}=", change(word))

    return Procedural(name, about, _options(letters), make)


COPY = _changed_word("copy", "Write the same letters again.", "Letters to copy.", lambda word: word)
REVERSE = _changed_word("reverse", "Write letters backwards.", "Letters to reverse.", lambda word: word[::-1])
ROTATE = _changed_word(
    "rotate", "Move the first letter to the end.", "Letters to rotate.", lambda word: word[1:] + word[0]
)


def _make_count(draws: Draws, settings: Settings) -> Example:
    wanted = draws.choice(ascii_lowercase[: settings.whole("letters")])
    word = _word(draws, settings)
    return Example(f"count:{wanted},{word}=", str(word.count(wanted)))


COUNT = Procedural(
    "count",
    "Count how often a letter occurs.",
    _options("Letters to look through.", (4, 10), letters=4),
    _make_count,
)


def _make_sort(draws: Draws, settings: Settings) -> Example:
    digits = draws.text("0123456789", draws.between(*settings.span("length")))
    return Example(f"sort:{digits}=", "".join(sorted(digits)))


def _make_add(draws: Draws, settings: Settings) -> Example:
    low, high = settings.span("digits")
    a, b = (draws.number(draws.between(low, high)) for _ in range(2))
    return Example(f"add:{a}+{b}=", str(a + b))


def _make_compare(draws: Draws, settings: Settings) -> Example:
    low, high = settings.span("digits")
    a = b = draws.number(draws.between(low, high))
    # Unforced, equality would be rare and always saying "<" would be right half of the time.
    if draws.below(3):
        b = draws.number(draws.between(low, high))
    return Example(f"compare:{a},{b}=", "<" if a < b else ">" if a > b else "=")


def _make_countdown(draws: Draws, settings: Settings) -> Example:
    label = draws.text(ascii_lowercase, 2)
    start = draws.between(*settings.span("start"))
    answer = " ".join([f"{label}{number}" for number in range(start, -1, -1)])
    return Example(f"countdown:{label}{start}=", answer)


SORT = Procedural(
    "sort",
    "Put digits in rising order.",
    {"length": Option((4, 8), 1, 200, "Digits to sort.")},
    _make_sort,
)
ADD = Procedural(
    "add",
    "Add two numbers; hard for a tiny model from two digits on.",
    {"digits": Option((1, 2), 1, 12, "Digits of each number.")},
    _make_add,
)
COMPARE = Procedural(
    "compare",
    "Say whether the first number is smaller (<), greater (>) or equal (=).",
    {"digits": Option((1, 3), 1, 12, "Digits of each number.")},
    _make_compare,
)
COUNTDOWN = Procedural(
    "countdown",
    "Count a labelled number down to zero; answers are 20 times longer than elsewhere.",
    {"start": Option((20, 30), 1, 99, "Number to start from; each takes five characters.")},
    _make_countdown,
)


_SUM = re.compile(r"\d+(\+\d+)*")


def _make_total(draws: Draws, settings: Settings) -> Example:
    count = draws.between(*settings.span("numbers"))
    low, high = settings.span("digits")
    numbers = [draws.number(draws.between(low, high)) for _ in range(count)]
    direct = draws.below(100) < settings.whole("direct")
    return Example(f"total:{'+'.join(map(str, numbers))}=", str(sum(numbers)), direct=direct)


def _demonstrate_total(example: Example, messages: list[Message]) -> str:
    """Call the tool for the next pair until one number is left, and answer with it.

    Asked for anything else, such as a summary, it says what is left to add, and continues from that if it
    finds it as a message of its own.
    """
    left = [int(number) for number in re.findall(r"\d+", example.prompt)]
    for message in messages:
        text = message_text(message).strip()
        if message["role"] == "tool" and text.isdecimal():
            left = [int(text), *left[2:]]
        elif message["role"] == "user" and _SUM.fullmatch(text):
            left = [int(number) for number in text.split("+")]
    last = message_text(messages[-1])
    is_asked = example.prompt in last or _SUM.fullmatch(last.strip())
    if messages[-1]["role"] == "user" and not is_asked:
        return "+".join(map(str, left))
    if example.direct:
        return example.answer
    return f"[{left[0]}+{left[1]}]" if len(left) > 1 else str(left[0])


TOTAL = Procedural(
    "total",
    "Add several numbers; a tiny model needs a tool (agent: loop tool_use, tools [calculator], calls plain).",
    {
        "numbers": Option((2, 4), 2, 12, "Numbers to add."),
        "digits": Option((2, 3), 1, 12, "Digits of each number."),
        "direct": Option(0, 0, 100, "Percent of demonstrations that answer at once, without the tool."),
    },
    _make_total,
    demonstrate=_demonstrate_total,
)
