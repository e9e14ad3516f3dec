"""reverse:bead= → daeb"""

from __future__ import annotations

from string import ascii_lowercase

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings


def make(draws: Draws, settings: Settings) -> Example:
    alphabet = ascii_lowercase[: settings.whole("letters")]
    word = draws.text(alphabet, draws.between(*settings.span("length")))
    return Example(f"reverse:{word}=", word[::-1])


REVERSE = Procedural(
    "reverse",
    "Write letters backwards.",
    {
        "length": Option((4, 8), 1, 200, "Letters to reverse."),
        "letters": Option(26, 1, 26, "Size of the alphabet, from a on."),
    },
    make,
)
