"""The built-in tasks: right answers, disjoint splits, pure functions of (seed, split, index)."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from practicum.errors import RecipeError, RecipeErrors
from practicum.models.tokenizer import CHARACTERS
from practicum.tasks.builtin import TASKS, bind, describe_tasks
from practicum.tasks.draws import Draws
from practicum.tasks.pictures import COLOURS
from practicum.tasks.procedural import Example, split_of

kinds = st.sampled_from(sorted(TASKS))
seeds = st.integers(0, 2**32)
indices = st.integers(0, 10**12)
splits = st.sampled_from(["train", "eval"])


def solve(example: Example) -> str:
    """The answer worked out from prompt and pictures, independently of the generators."""
    name, _, rest = example.prompt.removesuffix("=").partition(":")
    if name in ("colour", "dots"):
        return look(name, example.pictures[int(rest or 1) - 1].draw())
    if name == "copy":
        return rest
    if name == "reverse":
        return "".join(reversed(rest))
    if name == "rotate":
        return "".join(rest[i - len(rest) + 1] for i in range(len(rest)))
    if name == "sort":
        return "".join(str(d) * rest.count(str(d)) for d in range(10))
    if name in ("add", "total"):
        return str(sum(int(part) for part in rest.split("+")))
    if name == "countdown":
        label, start = rest[:2], int(rest[2:])
        return " ".join(f"{label}{start - i}" for i in range(start + 1))
    first, _, second = rest.partition(",")
    if name == "count":
        return str(sum(letter == first for letter in second))
    assert name == "compare"
    difference = int(first) - int(second)
    return "=" if difference == 0 else "<>"[difference > 0]


def look(name: str, picture: Image.Image) -> str:
    """What the pixels show: the one colour that is not grey, or the number of white islands."""
    pixels: Any = picture.load()
    places = [(x, y) for x in range(picture.width) for y in range(picture.height)]
    if name == "colour":
        corners = Counter(pixels[place] for place in places)
        (colour,) = {shown for shown in corners if shown in COLOURS.values()}
        return next(word for word, value in COLOURS.items() if value == colour)
    white, islands = {place for place in places if pixels[place] == COLOURS["white"]}, 0
    while white:
        islands, reached = islands + 1, {white.pop()}
        while reached:
            x, y = reached.pop()
            near = {(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)} & white
            white -= near
            reached |= near
    return str(islands)


@given(kinds, seeds, splits, indices)
def test_every_example_is_right_and_its_checker_takes_the_demonstration(kind, seed, split, index):
    task = bind("mine", kind, {})
    example = task.example(seed, split, index)
    assert example.answer == solve(example)
    assert set(example.prompt + example.answer) <= set(CHARACTERS)
    assert TASKS[kind].check(f" {example.answer}\n", example.answer, {}) == 1.0


@given(kinds, seeds, indices, st.data())
def test_checkers_reject_corrupted_answers(kind, seed, index, data):
    answer = bind("mine", kind, {}).example(seed, "train", index).answer
    at = data.draw(st.integers(0, len(answer) - 1))
    other = data.draw(st.sampled_from("".join(CHARACTERS.split())).filter(lambda c: c != answer[at]))
    for wrong in (answer[:at] + other + answer[at + 1 :], answer + other, answer[:-1], ""):
        assert TASKS[kind].check(wrong, answer, {}) == 0.0


@given(kinds, seeds, splits, indices)
def test_an_example_is_a_pure_function_of_seed_split_and_index(kind, seed, split, index):
    assert bind("a", kind, {}).example(seed, split, index) == bind("a", kind, {}).example(seed, split, index)
    assert split_of(bind("a", kind, {}).example(seed, split, index).key) == split


def shown(example: Example) -> tuple[object, ...]:
    """All that a model is shown: the text and the very pixels."""
    images = [picture.draw() for picture in example.pictures]
    return example.prompt, *((image.size, image.tobytes()) for image in images)


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_splits_are_disjoint_across_seeds_and_task_names(kind):
    train = {shown(bind("a", kind, {}).example(1, "train", i)) for i in range(500)}
    held_out = {shown(bind("b", kind, {}).example(2, "eval", i)) for i in range(500)}
    assert train
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_seeds_names_and_indices_give_different_prompts(kind):
    streams = [(s, n) for s in (0, 1) for n in ("a", "b")]
    drawn = [tuple(bind(n, kind, {}).example(s, "train", i).key for i in range(50)) for s, n in streams]
    assert len(set(drawn)) == len(streams)
    assert all(len(set(prompts)) > 25 for prompts in drawn)


def test_examples_stay_the_same_between_versions():
    # A changed draw would silently change every seeded run and checkpoint.
    assert bind("sort", "sort", {}).example(0, "train", 0) == Example("sort:84076=", "04678")
    assert bind("add", "add", {}).example(7, "eval", 10**9) == Example("add:3+9=", "12")


@pytest.mark.parametrize(
    ("kind", "options", "low", "high"),
    [
        ("sort", {"length": [12, 20]}, 12, 20),
        ("sort", {"length": 5}, 5, 5),
        ("copy", {"length": (3, 3)}, 3, 3),
    ],
)
def test_length_option_bounds_the_answer(kind, options, low, high):
    lengths = {len(bind("t", kind, options).example(0, "train", i).answer) for i in range(400)}
    assert min(lengths) == low
    assert max(lengths) == high


@pytest.mark.parametrize("value", [[8, 4], [0, 4], [4, 1001], "4", [4, 5, 6], [], True, 4.0, None])
def test_wrong_option_value_names_its_path(value):
    with pytest.raises(RecipeError) as caught:
        bind("digits", "sort", {"length": value})
    assert caught.value.path == "tasks.digits.options.length"
    assert "between 1 and 1000" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_whole_number_option_refuses_a_span():
    with pytest.raises(RecipeError, match=r"an integer between 1 and 26"):
        bind("t", "copy", {"letters": [1, 2]})


def test_several_option_mistakes_are_shown_together():
    with pytest.raises(RecipeErrors) as caught:
        bind("t", "copy", {"lenght": 3, "letters": 27})
    assert len(caught.value.errors) == 2


def test_too_few_examples_are_an_error_not_an_endless_loop():
    task = bind("t", "copy", {"length": 1, "letters": 1})
    empty = "eval" if split_of("copy:a=") == "train" else "train"
    with pytest.raises(RecipeError, match=r"tasks\.t\.options: .*too few examples of copy"):
        task.example(0, empty, 0)


def test_descriptions_show_an_example_and_every_option():
    described = {d.name: d for d in describe_tasks()}
    assert set(described) == set(TASKS)
    for name, description in described.items():
        example = bind(name, name, {}).example(0, "train", 0)
        assert (description.prompt, description.answer) == (str(example), solve(example))
        assert set(description.options) == set(TASKS[name].options)
    assert described["sort"].options["length"] == "[4, 8]: Digits to sort."


def test_the_table_of_tasks_is_cheap_to_import():
    code = "import sys, practicum.tasks.builtin; print([m for m in ('torch', 'numpy', 'transformers', 'PIL') if m in sys.modules])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_draws_are_uniform():
    def chi_square(seed: int) -> float:
        draws, counts = Draws("uniform", seed), [0] * 7
        for _ in range(700):
            counts[draws.below(7)] += 1
        return sum((count - 100) ** 2 / 100 for count in counts)

    # Six degrees of freedom: mean 6, and the mean of 60 has a standard deviation of 0.45.
    assert 4.2 < sum(map(chi_square, range(60))) / 60 < 7.8
