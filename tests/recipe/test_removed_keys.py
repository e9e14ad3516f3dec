"""Every removed key is refused with advice that names what replaced it."""

import pytest

from practicum.errors import RecipeErrors
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.removed_keys import REMOVED
from practicum.recipe.text.type_text import all_keys


def nested(steps: list[str]) -> dict:
    """Return data that sets one key to 1; a * names an entry, or an item after a key that takes a list."""
    step, *rest = steps
    if rest[:1] == ["*"] and step in ("tools", "functions", "own"):
        return {step: [nested(rest[1:])]}
    return {"t" if step == "*" else step: nested(rest) if rest else 1}


def merged(one: dict, two: dict) -> dict:
    both = {key: merged(one[key], two[key]) for key in one.keys() & two.keys()}
    return one | two | both


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_with_advice(key: str):
    base = {"name": "run", "model": {"random_init": {}}, "tasks": {"t": {"kind": "sort"}}}
    with pytest.raises(RecipeErrors) as found:
        load_recipe(merged(base, nested(key.split("."))))
    written = key.replace("tools.*", "tools[0]").replace("*", "t")
    errors = {error.path: error.suggestion for error in found.value.errors}
    assert errors[written] == REMOVED[key]


def test_no_removed_key_exists():
    present = {path.replace("<name>", "*").replace("[]", ".*") for path, _ in all_keys()}
    assert not present & REMOVED.keys()
