"""What the tasks on pictures share: their options, and how one of several pictures is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from practicum.tasks.draws import Draws
from practicum.tasks.pictures import Picture
from practicum.tasks.procedural import Example, Option, Settings

SIZE = Option((16, 16), 12, 64, "Pixels of a picture's sides; each is drawn on its own.")
PICTURES = Option((1, 1), 1, 4, "Pictures of a prompt; of several, one is asked for by its number.")
TEXT_ONLY = Option(0, 0, 100, "Percent of prompts that say in words what a picture would show.")


def is_text_only(draws: Draws, settings: Settings) -> bool:
    """Whether this prompt is to have no picture."""
    return draws.below(100) < settings.whole("text_only")


def draw_size(draws: Draws, settings: Settings) -> tuple[int, int]:
    """Width and height of a picture."""
    span = settings.span("size")
    return draws.between(*span), draws.between(*span)


def ask(draws: Draws, name: str, pictures: Sequence[Picture], answers: Sequence[str]) -> Example:
    """The prompt that asks for one of the pictures, and its answer."""
    if len(pictures) == 1:
        return Example(f"{name}=", answers[0], tuple(pictures))
    wanted = draws.below(len(pictures))
    return Example(f"{name}:{wanted + 1}=", answers[wanted], tuple(pictures))
