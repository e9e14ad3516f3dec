"""The built-in tasks on pictures: their options, and prompts that are chats with pictures."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from practicum.errors import MissingExtraError
from practicum.models.processor import make_processor, make_vision_tokenizer
from practicum.models.tokenizer import CHARACTERS
from practicum.recipe.schema.recipe import Task
from practicum.tasks.builtin import bind
from practicum.tasks.pictures import COLOURS, Picture, Shape
from practicum.tasks.procedural import Example
from practicum.tasks.prompts import demonstrated_turn, encode_prompt
from practicum.tasks.stream import eval_prompts, make_stream

KINDS = ("colour", "dots")


def examples(kind: str, options: dict[str, object], count: int = 300) -> list[Example]:
    task = bind("t", kind, options)
    return [task.example(0, "train", i) for i in range(count)]


def test_shapes_are_drawn_where_they_are_said_to_be():
    image = Picture(12, 10, 100, (Shape(0, 0, 3, "square", "red"), Shape(6, 4, 5, "disc", "blue"))).draw()
    assert image.size == (12, 10)
    assert image.getpixel((2, 2)) == COLOURS["red"]
    assert image.getpixel((3, 3)) == (100, 100, 100)
    assert image.getpixel((8, 6)) == COLOURS["blue"]
    assert image.getpixel((6, 4)) == (100, 100, 100)  # the corner of a disc's box


@pytest.mark.parametrize("kind", KINDS)
def test_options_bound_the_pictures(kind):
    drawn = examples(kind, {"size": [12, 40], "pictures": [2, 3]})
    assert {len(e.pictures) for e in drawn} == {2, 3}
    sides = {side for e in drawn for p in e.pictures for side in (p.width, p.height)}
    assert sides == set(range(12, 41))
    assert {e.prompt for e in drawn} == {f"{kind}:{n}=" for n in (1, 2, 3)}


@pytest.mark.parametrize("kind", KINDS)
def test_of_several_pictures_the_one_asked_for_decides(kind):
    for example in examples(kind, {"pictures": 3}):
        one = example.pictures[int(example.prompt[len(kind) + 1 : -1]) - 1]
        expected = one.shapes[0].colour if kind == "colour" else str(len(one.shapes))
        assert example.answer == expected


@pytest.mark.parametrize("kind", KINDS)
def test_some_prompts_say_in_words_what_a_picture_would_show(kind):
    drawn = examples(kind, {"text_only": 30}, 1000)
    words = [e for e in drawn if not e.pictures]
    assert 200 < len(words) < 400
    for example in words:
        assert set(example.prompt) <= set(CHARACTERS)
        said = example.prompt.removesuffix("=").split(":")
        if kind == "dots":
            assert example.answer == str(said[1].count("."))
        else:
            assert f"{example.answer} {said[2]}" in said[1].split(",")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_the_stream_are_chats_with_pictures_or_without(kind):
    task = Task(kind=kind, options={"text_only": 50, "pictures": [1, 2]})
    tokenizer = make_vision_tokenizer()
    processor = make_processor(tokenizer)
    kinds = Counter()
    for prompt in make_stream({"see": task}, seed=1).take(40):
        assert prompt.example is not None
        encoded = encode_prompt(prompt, tokenizer, chat=False, system=None, processor=processor)
        assert encoded.messages is not None
        pictures = 0 if encoded.images is None else len(encoded.images.grid)
        assert pictures == len(prompt.example.pictures)
        assert tokenizer.unk_token_id not in encoded.ids
        assert demonstrated_turn(prompt, encoded.messages) == prompt.answer
        kinds[pictures] += 1
    assert set(kinds) == {0, 1, 2}


def test_evaluation_prompts_differ_in_their_pictures():
    prompts = eval_prompts({"see": Task(kind="colour")}, 100, seed=0)
    assert len({p.example.key for p in prompts if p.example}) == 100
    assert {p.example.prompt for p in prompts if p.example} == {"colour="}


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"practicum\[vision\]"):
        Picture(8, 8, 0, ()).draw()
