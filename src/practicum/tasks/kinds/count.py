"""count:a,cabadab= → 3"""

from __future__ import annotations

from string import ascii_lowercase

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings


def make(draws: Draws, settings: Settings) -> Example:
    alphabet = ascii_lowercase[: settings.whole("letters")]
    wanted = draws.choice(alphabet)
    word = draws.text(alphabet, draws.between(*settings.span("length")))
    return Example(f"count:{wanted},{word}=", str(word.count(wanted)))


COUNT = Procedural(
    "count",
    "Count how often a letter occurs.",
    {
        "length": Option((4, 10), 1, 200, "Letters to look through."),
        "letters": Option(4, 1, 26, "Size of the alphabet, from a on."),
    },
    make,
)
