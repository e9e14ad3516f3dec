"""Words of letters: copy:bead= → bead, reverse:bead= → daeb, rotate:bead= → eadb, count:a,cabadab= → 3"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase

from practicum.tasks.draws import Draws
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
