"""[picture]dots= → 4"""

from __future__ import annotations

from practicum.tasks.draws import Draws
from practicum.tasks.kinds.views import PICTURES, SIZE, TEXT_ONLY, ask, draw_size, is_text_only
from practicum.tasks.pictures import Picture, Shape
from practicum.tasks.procedural import Example, Option, Procedural, Settings

_CELL, _DOT = 4, 3  # pixels: a dot keeps to a cell of its own, so that dots do not touch
_MOST = 9


def make(draws: Draws, settings: Settings) -> Example:
    if is_text_only(draws, settings):
        dots, blanks = draws.between(*settings.span("dots")), draws.between(1, _MOST)
        text = "".join(["." if on else "-" for on in _scatter(draws, dots, dots + blanks)])
        return Example(f"dots:{text}=", str(dots))
    pictures = [_picture(draws, settings) for _ in range(draws.between(*settings.span("pictures")))]
    return ask(draws, "dots", pictures, [str(len(picture.shapes)) for picture in pictures])


def _scatter(draws: Draws, count: int, cells: int) -> list[bool]:
    """Which of the cells are among `count` chosen ones."""
    chosen: set[int] = set()
    while len(chosen) < count:
        chosen.add(draws.below(cells))
    return [cell in chosen for cell in range(cells)]


def _picture(draws: Draws, settings: Settings) -> Picture:
    width, height = draw_size(draws, settings)
    across = width // _CELL
    cells = _scatter(draws, draws.between(*settings.span("dots")), across * (height // _CELL))
    dots = [
        Shape(cell % across * _CELL, cell // across * _CELL, _DOT, "disc", "white")
        for cell, taken in enumerate(cells)
        if taken
    ]
    return Picture(width, height, draws.between(0, 96), tuple(sorted(dots)))


DOTS = Procedural(
    "dots",
    "Count the dots in a picture; needs a vision model.",
    {
        "dots": Option((1, 6), 1, _MOST, "Dots in a picture."),
        "size": SIZE,
        "pictures": PICTURES,
        "text_only": TEXT_ONLY,
    },
    make,
    pictures=True,
)
