"""[picture]colour= → red"""

from __future__ import annotations

from practicum.tasks.draws import Draws
from practicum.tasks.kinds.views import PICTURES, SIZE, TEXT_ONLY, ask, draw_size, is_text_only
from practicum.tasks.pictures import COLOURS, FORMS, Picture, Shape
from practicum.tasks.procedural import Example, Option, Procedural, Settings

_LEAST = 6  # pixels of the smallest shape


def make(draws: Draws, settings: Settings) -> Example:
    colours = list(COLOURS)[: settings.whole("colours")]
    if is_text_only(draws, settings):
        said = {form: draws.choice(colours) for form in FORMS}
        wanted = draws.choice(FORMS)
        things = ",".join([f"{colour} {form}" for form, colour in said.items()])
        return Example(f"colour:{things}:{wanted}=", said[wanted])
    pictures = [_picture(draws, settings, colours) for _ in range(draws.between(*settings.span("pictures")))]
    return ask(draws, "colour", pictures, [picture.shapes[0].colour for picture in pictures])


def _picture(draws: Draws, settings: Settings, colours: list[str]) -> Picture:
    width, height = draw_size(draws, settings)
    size = draws.between(_LEAST, min(width, height) - 2)
    left, top = draws.between(0, width - size), draws.between(0, height - size)
    shape = Shape(left, top, size, draws.choice(FORMS), draws.choice(colours))
    return Picture(width, height, draws.between(96, 160), (shape,))


COLOUR = Procedural(
    "colour",
    "Name the colour of the shape in a picture; needs a vision model.",
    {
        "colours": Option(4, 2, len(COLOURS), f"How many colours, of {', '.join(COLOURS)}."),
        "size": SIZE,
        "pictures": PICTURES,
        "text_only": TEXT_ONLY,
    },
    make,
    pictures=True,
)
