"""Which teacher takes a prompt, and what it reads before it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.errors import DataError
from practicum.recipe.schema.teacher_sections import Route, Teacher
from practicum.tasks.prompts import Prompt
from practicum.teachers.route import before_text, routed_value, teacher_of

NAMES = ("a", "b", "c")
WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.floats(0.05, 10.0), min_size=1)


def prompt(uid: int = 0, answer: Any = "7", **row: Any) -> Prompt:
    return Prompt(uid, "sums", "math", "3+4=", answer, row, 0, uid)


def test_one_teacher_takes_every_prompt() -> None:
    assert teacher_of(prompt(), Route(), ["anyone"], 0) == "anyone"


@pytest.mark.parametrize(
    ("route", "teacher"),
    [
        (Route(), "math"),
        (Route(by="task"), "sums"),
        (Route(by="level"), "3"),
        (Route(by="subject"), "algebra"),
        (Route(by="subject", map={"algebra": "math"}), "math"),
        (Route(map={"other": "sums"}), "math"),
        (Route(map={"math": {"sums": 2.0}}), "sums"),
    ],
)
def test_a_value_names_its_teacher_or_is_mapped_to_it(route: Route, teacher: str) -> None:
    teachers = ["math", "sums", "3", "algebra"]
    assert teacher_of(prompt(level=3, subject="algebra"), route, teachers, 0) == teacher


@given(WEIGHTS, st.integers(0, 2**40), st.integers(0, 2**40), st.randoms())
def test_a_drawn_teacher_depends_on_seed_and_prompt_alone(
    weights: dict[str, float], seed: int, uid: int, random: Any
) -> None:
    names = list(weights)
    random.shuffle(names)
    written = Route(map={"math": weights})
    shuffled = Route(map={"math": {name: weights[name] for name in names}})
    first = teacher_of(prompt(uid), written, NAMES, seed)
    assert first in weights
    assert teacher_of(prompt(uid, answer="8", more=1), shuffled, NAMES[::-1], seed) == first


@settings(max_examples=20)
@given(WEIGHTS, st.integers(0, 1000))
def test_teachers_are_drawn_as_often_as_their_weights_say(weights: dict[str, float], seed: int) -> None:
    route, draws = Route(map={"math": weights}), 4000
    counts = Counter(teacher_of(prompt(uid), route, NAMES, seed) for uid in range(draws))
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(counts[name] / draws - share) < 5.5 * (share * (1 - share) / draws) ** 0.5 + 1e-9


def test_another_seed_draws_other_teachers() -> None:
    route = Route(map={"math": {"a": 1.0, "b": 1.0}})
    drawn = [[teacher_of(prompt(uid), route, NAMES, seed) for uid in range(64)] for seed in (0, 1)]
    assert drawn[0] != drawn[1]


def test_a_value_without_a_teacher_names_prompt_value_and_teachers() -> None:
    with pytest.raises(DataError, match=r"prompt 5 \(task sums.*'math'.*the teachers are a, b, c") as caught:
        teacher_of(prompt(5), Route(), NAMES, 0)
    assert "route.map: {math: …}" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [({"x": 1}, r"no column 'kind' \(only 'x'\)"), ({"kind": None}, "None"), ({"kind": True}, "True")],
)
def test_a_row_that_can_not_be_routed_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=rf"prompt 2 .*{words}"):
        routed_value(prompt(2, **row), Route(by="kind"))


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (None, ""),
        ("Be brief.", "Be brief."),
        ("The answer is {answer}.", "The answer is 7."),
        ("{hint} {{x}} {my level}", "carry {x} 3"),
    ],
)
def test_before_is_filled_in_from_the_row(before: str | None, text: str) -> None:
    row = {"hint": "carry", "my level": 3}
    assert before_text(Teacher(model="m", prompt_prefix=before), prompt(**row)) == text


def test_filled_in_text_is_not_filled_in_again() -> None:
    assert before_text(Teacher(model="m", prompt_prefix="{hint}"), prompt(hint="{answer} }")) == "{answer} }"


def test_a_column_that_is_missing_is_named() -> None:
    with pytest.raises(
        DataError, match=r"has no column 'hint' \(only 'other'\); prompt_prefix needs a string"
    ):
        before_text(Teacher(model="m", prompt_prefix="{hint}"), prompt(other=1))
    with pytest.raises(DataError, match="has the answer None; prompt_prefix needs a string or a number"):
        before_text(Teacher(model="m", prompt_prefix="{answer}"), prompt(answer=None))
