"""The built-in tasks on pictures: [picture]colour= → red, [picture]dots= → 4"""

from __future__ import annotations

from collections.abc import Sequence

from practicum.tasks.draws import Draws
from practicum.tasks.pictures import COLOURS, FORMS, Picture, Shape
from practicum.tasks.procedural import Example, Option, Procedural, Settings

_SIZE = Option((16, 16), 12, 64, "Pixels of a picture's sides; each is drawn on its own.")
_PICTURES = Option((1, 1), 1, 4, "Pictures of a prompt; of several, one is asked for by its number.")
_TEXT_ONLY = Option(0, 0, 100, "Percent of prompts that say in words what a picture would show.")


def _draw_size(draws: Draws, settings: Settings) -> tuple[int, int]:
    span = settings.span("size")
    return draws.between(*span), draws.between(*span)


def _ask(draws: Draws, name: str, pictures: Sequence[Picture], answers: Sequence[str]) -> Example:
    """Return the prompt that asks for one of the pictures, and its answer."""
    if len(pictures) == 1:
        return Example(f"{name}=", answers[0], tuple(pictures))
    wanted = draws.below(len(pictures))
    return Example(f"{name}:{wanted + 1}=", answers[wanted], tuple(pictures))


_SMALLEST_SHAPE = 6  # pixels of the smallest shape


def _make_colour(draws: Draws, settings: Settings) -> Example:
    colours = list(COLOURS)[: settings.whole("colours")]
    if draws.below(100) < settings.whole("text_only"):
        said = {form: draws.choice(colours) for form in FORMS}
        wanted = draws.choice(FORMS)
        things = ",".join([f"{colour} {form}" for form, colour in said.items()])
        return Example(f"colour:{things}:{wanted}=", said[wanted])
    pictures = [
        _colour_picture(draws, settings, colours) for _ in range(draws.between(*settings.span("pictures")))
    ]
    return _ask(draws, "colour", pictures, [picture.shapes[0].colour for picture in pictures])


def _colour_picture(draws: Draws, settings: Settings, colours: list[str]) -> Picture:
    width, height = _draw_size(draws, settings)
    size = draws.between(_SMALLEST_SHAPE, min(width, height) - 2)
    left, top = draws.between(0, width - size), draws.between(0, height - size)
    shape = Shape(left, top, size, draws.choice(FORMS), draws.choice(colours))
    return Picture(width, height, draws.between(96, 160), (shape,))


COLOUR = Procedural(
    "colour",
    "Name the colour of the shape in a picture; needs a vision model.",
    {
        "colours": Option(4, 2, len(COLOURS), f"How many colours, of {', '.join(COLOURS)}."),
        "size": _SIZE,
        "pictures": _PICTURES,
        "text_only": _TEXT_ONLY,
    },
    _make_colour,
    pictures=True,
)


_CELL, _DOT = 4, 3  # pixels: a dot keeps to a cell of its own, so that dots do not touch
_MOST_DOTS = 9


def _make_dots(draws: Draws, settings: Settings) -> Example:
    if draws.below(100) < settings.whole("text_only"):
        dots, blanks = draws.between(*settings.span("dots")), draws.between(1, _MOST_DOTS)
        text = "".join(["." if on else "-" for on in _scatter(draws, dots, dots + blanks)])
        return Example(f"dots:{text}=", str(dots))
    pictures = [_dots_picture(draws, settings) for _ in range(draws.between(*settings.span("pictures")))]
    return _ask(draws, "dots", pictures, [str(len(picture.shapes)) for picture in pictures])


def _scatter(draws: Draws, count: int, cells: int) -> list[bool]:
    chosen: set[int] = set()
    while len(chosen) < count:
        chosen.add(draws.below(cells))
    return [cell in chosen for cell in range(cells)]


def _dots_picture(draws: Draws, settings: Settings) -> Picture:
    width, height = _draw_size(draws, settings)
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
        "dots": Option((1, 6), 1, _MOST_DOTS, "Dots in a picture."),
        "size": _SIZE,
        "pictures": _PICTURES,
        "text_only": _TEXT_ONLY,
    },
    _make_dots,
    pictures=True,
)
