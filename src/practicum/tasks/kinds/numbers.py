"""Digits and numbers: sort:4291= → 1249, add:47+52= → 99, compare:47,52= → <, countdown:a2= → a2 a1 a0

A countdown's answer is 120 characters long where other tasks answer in 6.
"""

from __future__ import annotations

from string import ascii_lowercase

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings


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
