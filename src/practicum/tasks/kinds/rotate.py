"""rotate:bead= → eadb"""

from __future__ import annotations

from string import ascii_lowercase

from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings


def make(draws: Draws, settings: Settings) -> Example:
    alphabet = ascii_lowercase[: settings.whole("letters")]
    word = draws.text(alphabet, draws.between(*settings.span("length")))
    return Example(f"rotate:{word}=", word[1:] + word[0])


ROTATE = Procedural(
    "rotate",
    "Move the first letter to the end.",
    {
        "length": Option((4, 8), 1, 200, "Letters to rotate."),
        "letters": Option(26, 1, 26, "Size of the alphabet, from a on."),
    },
    make,
)
