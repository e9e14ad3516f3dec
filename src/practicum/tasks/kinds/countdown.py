"""countdown:ab3= → ab3 ab2 ab1 ab0, but 120 characters long where other tasks answer in 6"""

from __future__ import annotations

from string import ascii_lowercase

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings


def make(draws: Draws, settings: Settings) -> Example:
    label = draws.text(ascii_lowercase, 2)
    start = draws.between(*settings.span("start"))
    answer = " ".join([f"{label}{number}" for number in range(start, -1, -1)])
    return Example(f"countdown:{label}{start}=", answer)


COUNTDOWN = Procedural(
    "countdown",
    "Count a labelled number down to zero; answers are 20 times longer than elsewhere.",
    {"start": Option((20, 30), 1, 99, "Number to start from; each takes five characters.")},
    make,
)
