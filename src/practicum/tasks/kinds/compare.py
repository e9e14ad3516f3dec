"""compare:47,52= → <"""

from __future__ import annotations

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings


def make(draws: Draws, settings: Settings) -> Example:
    low, high = settings.span("digits")
    a = b = draws.number(draws.between(low, high))
    # Unforced, equality would be rare and always saying "<" would be right half of the time.
    if draws.below(3):
        b = draws.number(draws.between(low, high))
    return Example(f"compare:{a},{b}=", "<" if a < b else ">" if a > b else "=")


COMPARE = Procedural(
    "compare",
    "Say whether the first number is smaller (<), greater (>) or equal (=).",
    {"digits": Option((1, 3), 1, 12, "Digits of each number.")},
    make,
)
