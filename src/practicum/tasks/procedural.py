"""Kinds of tasks: options, a generator, an exact checker, and splits that cannot overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from practicum.errors import RecipeError
from practicum.tasks.draws import Draws
from practicum.tasks.messages import PICTURE, Content, Message, picture_message
from practicum.tasks.pictures import Picture

Split = Literal["train", "eval"]
Span = tuple[int, int]
_EVAL_SHARE = 8  # one in eight prompts is in the evaluation split
_ATTEMPTS = 4096


class Example(NamedTuple):
    """A prompt with its images and answer. With `direct`, its SFT example answers without the tool."""

    prompt: str
    answer: str
    pictures: tuple[Picture, ...] = ()
    direct: bool = False

    @property
    def key(self) -> str:
        """Key that is equal for prompts that look equal to a model."""
        return f"{self.prompt} {self.pictures!r}" if self.pictures else self.prompt

    def __str__(self) -> str:
        return PICTURE * len(self.pictures) + self.prompt


@dataclass(frozen=True, slots=True)
class Option:
    """An integer between `least` and `most`, or a range [min, max] if the default is a pair."""

    default: int | Span
    least: int
    most: int
    about: str

    def read(self, path: str, value: Any) -> int | Span:
        """Parse a value. Raise RecipeError at `path` if it is invalid."""
        is_span = isinstance(self.default, tuple)
        ends = list(value) if is_span and isinstance(value, list | tuple) else [value]
        # bool is an int to isinstance, and `length: true` is a mistake
        are_whole = all(type(end) is int and self.least <= end <= self.most for end in ends)
        if len(ends) not in (1, 2) or not are_whole or ends[0] > ends[-1]:
            shape = "[min, max] or an integer" if is_span else "an integer"
            raise RecipeError(path, repr(value), f"{shape} between {self.least} and {self.most}", self.about)
        return (ends[0], ends[-1]) if is_span else ends[0]


class Settings:
    """The validated options of a task: ranges and integers by name."""

    def __init__(self, values: Mapping[str, int | Span]) -> None:
        self.values = dict(values)

    def span(self, name: str) -> Span:
        value = self.values[name]
        assert isinstance(value, tuple)
        return value

    def whole(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int)
        return value


def equals(response_text: str, answer: str, row: Mapping[str, Any]) -> float:
    """Return 1.0 if the response equals the answer, ignoring surrounding whitespace."""
    return float(response_text.strip() == answer.strip())


@dataclass(frozen=True, slots=True)
class Procedural:
    """A kind of task: `make` draws an example, and `check(response_text, answer, row)` scores a response.

    `demonstrate(example, messages)` is the next turn of an SFT example. The prompts of a kind
    with `pictures` are chats, those without an image too.
    """

    name: str
    about: str
    options: Mapping[str, Option]
    make: Callable[[Draws, Settings], Example]
    check: Callable[[str, str, Mapping[str, Any]], float] = equals
    demonstrate: Callable[[Example, list[Message]], str] = lambda example, messages: example.answer
    pictures: bool = False

    def content(self, example: Example) -> Content:
        return [picture_message(example.pictures, example.prompt)] if self.pictures else example.prompt

    def settle(self, task: str, options: Mapping[str, Any]) -> tuple[Settings, list[RecipeError]]:
        """Return the options including defaults, and all mistakes."""
        values = {name: option.default for name, option in self.options.items()}
        problems = []
        for name, value in options.items():
            path = f"tasks.{task}.options.{name}"
            if name not in self.options:
                near = get_close_matches(str(name), self.options, n=1)
                known = ", ".join(self.options)
                hint = f"did you mean {near[0]}?" if near else "`practicum tasks` lists the options."
                problems.append(RecipeError(path, "an unknown option", f"one of {known} ({self.name})", hint))
                continue
            try:
                values[name] = self.options[name].read(path, value)
            except RecipeError as problem:
                problems.append(problem)
        return Settings(values), problems


def split_of(key: str) -> Split:
    """Return the split of an example's key, independent of seed and recipe, so that splits never overlap."""
    return "train" if blake2b(key.encode(), digest_size=8).digest()[0] % _EVAL_SHARE else "eval"


@dataclass(frozen=True, slots=True)
class BuiltinTask:
    """A kind with options and the task's name. `use` is the kind's name in the recipe."""

    name: str
    use: str
    kind: Procedural
    settings: Settings

    def example(self, seed: int, split: Split, index: int) -> Example:
        """Return example number `index`, a pure function of the arguments."""
        draws = Draws(seed, self.name, split, index)
        for _ in range(_ATTEMPTS):
            example = self.kind.make(draws, self.settings)
            if split_of(example.key) == split:
                return example
        shown = {name: list(v) if isinstance(v, tuple) else v for name, v in self.settings.values.items()}
        raise RecipeError(
            f"tasks.{self.name}.options",
            f"{shown}, which leave too few examples of {self.kind.name} to fill the {split} split",
            "options with more distinct prompts",
            "widen the options, for example with a greater length or size.",
        )
