"""add:47+52= → 99"""

from __future__ import annotations

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings


def make(draws: Draws, settings: Settings) -> Example:
    low, high = settings.span("digits")
    a, b = (draws.number(draws.between(low, high)) for _ in range(2))
    return Example(f"add:{a}+{b}=", str(a + b))


ADD = Procedural(
    "add",
    "Add two numbers; hard for a tiny model from two digits on.",
    {"digits": Option((1, 2), 1, 12, "Digits of each number.")},
    make,
)
