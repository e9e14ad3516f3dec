"""climb:137,140= → 137 138 139 140, but 120 characters long where other tasks answer in 6"""

from __future__ import annotations

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings

_FIRST, _LAST = 100, 999


def make(draws: Draws, settings: Settings) -> Example:
    count = draws.between(*settings.span("numbers"))
    first = draws.between(_FIRST, _LAST - count + 1)
    last = first + count - 1
    return Example(f"climb:{first},{last}=", " ".join(map(str, range(first, last + 1))))


CLIMB = Procedural(
    "climb",
    "Count from one three-digit number up to another; answers are 20 times longer than elsewhere.",
    {"numbers": Option((20, 40), 1, 400, "Numbers in the answer, four characters each.")},
    make,
)
