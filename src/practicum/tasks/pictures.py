"""Images of prompts: drawn from a description, or read from a file on demand. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from practicum.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 25, 25),
    "green": (30, 180, 40),
    "blue": (30, 60, 230),
    "yellow": (250, 230, 30),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "pink": (255, 120, 200),
    "brown": (130, 70, 20),
}
Form = Literal["square", "disc"]
FORMS: tuple[Form, ...] = ("square", "disc")


class Shape(NamedTuple):
    """A square or a disc in the box of `size` pixels at (left, top)."""

    left: int
    top: int
    size: int
    form: Form
    colour: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A small image: shapes that do not overlap on grey, sorted so that equal images are equal."""

    width: int
    height: int
    grey: int
    shapes: tuple[Shape, ...]

    def draw(self) -> Image:
        image_module, draw_module = _pillow("drawing images")
        image = image_module.new("RGB", (self.width, self.height), (self.grey,) * 3)
        pen = draw_module.Draw(image)
        for left, top, size, form, colour in self.shapes:
            box = (left, top, left + size - 1, top + size - 1)
            (pen.rectangle if form == "square" else pen.ellipse)(box, fill=COLOURS[colour])
        return image


def open_picture(source: Picture | str) -> Image:
    """Draw an image or read it from its path. Raise DataError if it can't be read."""
    if isinstance(source, Picture):
        return source.draw()
    image_module, _ = _pillow("reading images")
    from PIL import ImageOps

    if not Path(source).is_file():
        raise DataError(f"the image {source} does not exist; paths are relative to the dataset's file")
    try:
        with image_module.open(source) as image:
            # Cameras store the orientation as metadata instead of rotating the pixels.
            upright = ImageOps.exif_transpose(image)
            assert upright is not None
            return upright.convert("RGB")
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise DataError(f"the image {source} can't be read: {error}; save it again as PNG or JPEG") from error


def _pillow(what: str) -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise MissingExtraError(what, "vision") from None
    return Image, ImageDraw
