"""The built-in tasks, and their table. Cheap to import: no torch, no numpy, no Pillow.

Prompts name their task and end with "=": copy:bead= → bead, reverse:bead= → daeb, rotate:bead= → eadb,
count:a,cabadab= → 3, sort:4291= → 1249, add:47+52= → 99, compare:47,52= → <, countdown:a2= → a2 a1 a0, and
total:214+305+118= → 637, by way of [214+305] and [519+118] where there is a calculator. On pictures:
[picture]colour= → red, [picture]dots= → 4. Texts use the characters of the tiny tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any, NamedTuple

from practicum.errors import DataError, RecipeErrors
from practicum.recipe.own_parts import find_part, guarded
from practicum.tasks.draws import Draws
from practicum.tasks.messages import Message, message_text
from practicum.tasks.pictures import COLOURS, FORMS, Picture, Shape
from practicum.tasks.procedural import BuiltinTask, Example, Option, Procedural, Settings
from practicum.user_code import short_repr


def _options(about: str, length: tuple[int, int] = (4, 8), letters: int = 26) -> dict[str, Option]:
    return {
        "length": Option(length, 1, 200, about),
        "letters": Option(letters, 1, 26, "Size of the alphabet, from a on."),
    }


def _word(draws: Draws, settings: Settings) -> str:
    return draws.text(ascii_lowercase[: settings.whole("letters")], draws.between(*settings.span("length")))


def _changed_word(name: str, about: str, letters: str, change: Callable[[str], str]) -> Procedural:
    """A kind of task whose answer is a changed word. `letters` describes the option."""

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


def _make_sort(draws: Draws, settings: Settings) -> Example:
    digits = draws.text("0123456789", draws.between(*settings.span("length")))
    return Example(f"sort:{digits}=", "".join(sorted(digits)))


def _make_add(draws: Draws, settings: Settings) -> Example:
    low, high = settings.span("digits")
    a, b = (draws.number(draws.between(low, high)) for _ in range(2))
    return Example(f"add:{a}+{b}=", str(a + b))


def _make_compare(draws: Draws, settings: Settings) -> Example:
    low, high = settings.span("digits")
    a = b = draws.number(draws.between(low, high))
    # Unforced, equality would be rare and always saying "<" would be right half of the time.
    if draws.below(3):
        b = draws.number(draws.between(low, high))
    return Example(f"compare:{a},{b}=", "<" if a < b else ">" if a > b else "=")


def _make_countdown(draws: Draws, settings: Settings) -> Example:
    label = draws.text(ascii_lowercase, 2)
    start = draws.between(*settings.span("start"))
    answer = " ".join([f"{label}{number}" for number in range(start, -1, -1)])
    return Example(f"countdown:{label}{start}=", answer)


SORT = Procedural(
    "sort", "Put digits in rising order.", {"length": Option((4, 8), 1, 1000, "Digits to sort.")}, _make_sort
)
ADD = Procedural(
    "add",
    "Add two numbers; hard for a tiny model from two digits on.",
    {"digits": Option((1, 2), 1, 12, "Digits of each number.")},
    _make_add,
)
COMPARE = Procedural(
    "compare",
    "Say whether the first number is smaller (<), greater (>) or equal (=).",
    {"digits": Option((1, 3), 1, 12, "Digits of each number.")},
    _make_compare,
)
COUNTDOWN = Procedural(
    "countdown",
    "Count a labelled number down to zero; answers are 20 times longer than elsewhere.",
    {"start": Option((20, 30), 1, 99, "Number to start from; each takes five characters.")},
    _make_countdown,
)


_SUM = re.compile(r"\d+(\+\d+)*")


def _make_total(draws: Draws, settings: Settings) -> Example:
    count = draws.between(*settings.span("numbers"))
    low, high = settings.span("digits")
    numbers = [draws.number(draws.between(low, high)) for _ in range(count)]
    direct = draws.below(100) < settings.whole("direct")
    return Example(f"total:{'+'.join(map(str, numbers))}=", str(sum(numbers)), direct=direct)


def _demonstrate_total(example: Example, messages: list[Message]) -> str:
    """Call the tool for the next pair until one number is left, and answer with it.

    Asked for anything else, such as a summary, it says what is left to add, and continues from that if it
    finds it as a message of its own.
    """
    left = [int(number) for number in re.findall(r"\d+", example.prompt)]
    for message in messages:
        text = message_text(message).strip()
        if message["role"] == "tool" and text.isdecimal():
            left = [int(text), *left[2:]]
        elif message["role"] == "user" and _SUM.fullmatch(text):
            left = [int(number) for number in text.split("+")]
    last = message_text(messages[-1])
    is_asked = example.prompt in last or _SUM.fullmatch(last.strip())
    if messages[-1]["role"] == "user" and not is_asked:
        return "+".join(map(str, left))
    if example.direct:
        return example.answer
    return f"[{left[0]}+{left[1]}]" if len(left) > 1 else str(left[0])


TOTAL = Procedural(
    "total",
    "Add several numbers; a tiny model needs a tool (agent: loop tool_use, tools [calculator], calls plain).",
    {
        "numbers": Option((2, 4), 2, 12, "Numbers to add."),
        "digits": Option((2, 3), 1, 12, "Digits of each number."),
        "direct": Option(0, 0, 100, "Percent of SFT examples that answer directly, without the tool."),
    },
    _make_total,
    demonstrate=_demonstrate_total,
)


_SIZE = Option((16, 16), 12, 64, "Pixels of an image's sides. Each side is drawn separately.")
_PICTURES = Option((1, 1), 1, 4, "Images per prompt. With several, the question names one by number.")
_TEXT_ONLY = Option(0, 0, 100, "Percent of prompts that describe the image as text.")


def _draw_size(draws: Draws, settings: Settings) -> tuple[int, int]:
    span = settings.span("size")
    return draws.between(*span), draws.between(*span)


def _ask(draws: Draws, name: str, pictures: Sequence[Picture], answers: Sequence[str]) -> Example:
    """Return the prompt that asks for one of the images, and its answer."""
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
    "Name the colour of the shape in an image; needs a vision model.",
    {
        "colours": Option(4, 2, len(COLOURS), f"How many colours, of {', '.join(COLOURS)}."),
        "size": _SIZE,
        "pictures": _PICTURES,
        "text_only": _TEXT_ONLY,
    },
    _make_colour,
    pictures=True,
)


_CELL, _DOT = 4, 3  # pixels: each dot is in a separate cell, so that dots do not touch
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
    "Count the dots in an image; needs a vision model.",
    {
        "dots": Option((1, 6), 1, _MOST_DOTS, "Dots in an image."),
        "size": _SIZE,
        "pictures": _PICTURES,
        "text_only": _TEXT_ONLY,
    },
    _make_dots,
    pictures=True,
)


TASKS: dict[str, Procedural] = {
    kind.name: kind
    for kind in (COPY, REVERSE, ROTATE, COMPARE, COUNT, SORT, ADD, COUNTDOWN, TOTAL, COLOUR, DOTS)
}
"""Kinds by name, roughly from easy to hard, then those for tools and images."""


def find_kind(name: str, task: str = "<name>") -> Procedural:
    """Return the built-in or custom kind of this name. Raise RecipeError at the task for an unknown name."""
    kind = find_part("task_kind", name, TASKS, path=f"tasks.{task}.kind", of=Procedural)
    return kind if name in TASKS else _guarded(kind, f"tasks.{task}.kind: {name}")


def _guarded(kind: Procedural, what: str) -> Procedural:
    """Wrap a custom kind: its functions report where they raised, and its examples are checked."""

    def make(draws: Draws, settings: Settings) -> Example:
        example = guarded(kind.make, what)(draws, settings)
        if not isinstance(example, Example) or not all(isinstance(text, str) for text in example[:2]):
            found = f"{what} made {short_repr(example)}"
            raise DataError(f"{found}, expected an Example(prompt, answer) whose prompt and answer are texts")
        return example

    check, demonstrate = guarded(kind.check, what), guarded(kind.demonstrate, what)
    return replace(kind, make=make, check=check, demonstrate=demonstrate)


def bind(task: str, kind: str, options: Mapping[str, Any]) -> BuiltinTask:
    """Return the task `task` of the recipe: a kind with options. RecipeErrors for mistakes in them."""
    builtin = find_kind(kind, task)
    settings, problems = builtin.settle(task, options)
    if problems:
        raise problems[0] if len(problems) == 1 else RecipeErrors(f"tasks.{task}", problems)
    return BuiltinTask(task, kind, builtin, settings)


class TaskDescription(NamedTuple):
    """A kind in `practicum tasks`. `options` maps names to default and description."""

    name: str
    about: str
    prompt: str
    answer: str
    options: dict[str, str]


def describe_tasks() -> list[TaskDescription]:
    described = []
    for name, kind in TASKS.items():
        example = bind(name, name, {}).example(0, "train", 0)
        options = {
            key: f"{list(o.default) if isinstance(o.default, tuple) else o.default}: {o.about}"
            for key, o in kind.options.items()
        }
        described.append(TaskDescription(name, kind.about, str(example), example.answer, options))
    return described
