from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from practicum.errors import RecipeError
from practicum.recipe.text.yamlfile import dump, parse

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
looks_like_something = st.sampled_from(
    ["1e-5", "off", "yes", "null", "~", "1:30", "0x10", "010", "2024-01-01", ".inf", "true", "1_0", "="]
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), words, looks_like_something
)
keys = st.one_of(words, looks_like_something).filter(lambda key: "." not in key)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@given(documents, st.booleans())
def test_what_is_dumped_is_parsed_back(data: Any, flow: bool) -> None:
    text = dump(data, flow=flow)
    parsed = parse(text, "x").data
    assert parsed == data
    assert repr(parsed) == repr(data)  # 1 is not 1.0 and not True


@given(words | looks_like_something)
def test_a_yaml_1_1_parser_reads_dumped_text_as_text(text: str) -> None:
    assert yaml.safe_load(dump({"key": text})) == {"key": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("-.5e+2", -50.0),
        ("3.", 3.0),
        ("16_384", 16384),
        ("010", 10),
        ("-7", -7),
        ("off", "off"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("'1e-5'", "1e-5"),
        ("~", None),
        ("", None),
        ("-.inf", float("-inf")),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
    ],
)
def test_scalars_are_what_they_look_like(text: str, value: Any) -> None:
    parsed = parse(text, "x").data
    assert parsed == value
    assert type(parsed) is type(value)


def test_lines_of_nested_keys_are_known() -> None:
    document = parse("a: 1\nb:\n  c: 2\n  d: [1,\n    2]\n  e: {f: 3}\n", "x.yaml")
    assert document.lines == {"a": 1, "b": 2, "b.c": 3, "b.d": 4, "b.e": 6, "b.e.f": 6}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3:1", "'a' again, first in line 1"),
        ("t:\n  lr: 1\n  lr: 2\n", "x.yaml:3:3", "'lr' again, first in line 2"),
        ("t: {lr: 1, lr: 2}\n", "x.yaml:1:12", "'lr' again"),
        ("a: [1\nb: 2\n", "x.yaml:2:2", "YAML syntax error"),
        ("a:\n\tb: 1\n", "x.yaml:2:1", "spaces, not tabs"),
        ("a: b: c\n", "x.yaml:1:5", "indentation"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2:1", "one recipe"),
        ("1: a\n", "x.yaml:1:1", "put it in quotes"),
        ("[a]: b\n", "x.yaml:1:1", "a string as a key"),
        ("train.lr: 1\n", "x.yaml:1:1", "lr inside train"),
        ("a: !!python/name:os.system\n", "x.yaml:1:1", "without tags"),
        ("a: !!int x\n", "x.yaml", "its tag"),
        ("a: *nobody\n", "x.yaml:1:4", "undefined alias"),
        ("a: \x00\n", "x.yaml", "position 3"),
        ("[" * 500, "x.yaml", "nested too deeply"),
    ],
)
def test_broken_yaml_names_the_place_and_the_reason(text: str, place: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text, "x.yaml")
    assert caught.value.path == place
    assert words in str(caught.value)


def test_an_alias_is_a_copy() -> None:
    data = parse("a: &x [1]\nb: *x\n", "x").data
    assert data == {"a": [1], "b": [1]}
    assert data["a"] is not data["b"]
