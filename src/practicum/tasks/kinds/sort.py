"""sort:4291= → 1249"""

from __future__ import annotations

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings


def make(draws: Draws, settings: Settings) -> Example:
    digits = draws.text("0123456789", draws.between(*settings.span("length")))
    return Example(f"sort:{digits}=", "".join(sorted(digits)))


SORT = Procedural(
    "sort",
    "Put digits in rising order.",
    {"length": Option((4, 8), 1, 200, "Digits to sort.")},
    make,
)
