"""Recipes drawn at random from the schema, with mistakes, are accepted or refused with a PracticumError."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.recipe.draw_recipes import draw_recipe, mutate

from practicum import api
from practicum.errors import PracticumError

JUNK = (b"\t", b"\xff", b"\0", b"{", b"&a", b"*a", b"!!python/none ", b": ", b"- ", b"<<: ")


def write(recipe: dict[str, Any], rng: random.Random) -> bytes:
    """Return the recipe's text. One in ten is damaged."""
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode(errors="surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(text) + 1)
        return text[:at] + rng.choice(JUNK) + text[at + rng.randrange(3) :]
    return text


def test_random_recipes_are_accepted_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 8)
    path, accepted = tmp_path / "fuzz.yaml", 0
    for seed in range(80):
        rng = random.Random(seed)
        recipe = draw_recipe(rng)
        for _ in range(rng.choice([0, 0, 1, 2, 4])):
            recipe = mutate(recipe, rng)
        path.write_bytes(write(recipe, rng))
        try:
            api.check(path, static=True).text(everything=True)
            accepted += 1
        except PracticumError:
            continue
    assert 5 < accepted < 75
