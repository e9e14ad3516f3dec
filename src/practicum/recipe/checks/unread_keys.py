"""Find keys that are set although nothing reads them, as declared by `ReadWhen` in the schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from practicum.errors import RecipeError
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.section import Chain, ReadWhen, Section
from practicum.recipe.text import yamlfile


class UnreadKey(NamedTuple):
    """A key that nothing reads in this recipe, and the reason, such as "with url"."""

    path: str
    value: Any
    default: Any
    why: str
    rule: ReadWhen


def unread_keys(recipe: Recipe) -> Iterator[UnreadKey]:
    """Yield every key of the recipe that nothing reads, set or not."""
    yield from _unread((recipe,), "", ())


def check_unread(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield a problem for each unread key that is set, except keys that other runs of the recipe may read."""
    for key in unread_keys(recipe):
        if key.value != key.default and key.rule.refused:
            expected = f"{as_written(key.default)} (nothing would read another value)"
            yield RecipeError(key.path, f"{as_written(key.value)} {key.why}", expected, key.rule.advice)


def unread_notes(recipe: Recipe) -> dict[str, str]:
    """Return the keys that are set but not read by this run, with the reasons."""
    return {key.path: f"not read {key.why}" for key in unread_keys(recipe) if key.value != key.default}


def _unread(chain: Chain, path: str, outer: Sequence[tuple[str, ReadWhen]]) -> Iterator[UnreadKey]:
    """Yield the unread keys of a section. `outer` holds the reasons why the section itself is not read."""
    section = chain[-1]
    for name, info in type(section).model_fields.items():
        here, value = f"{path}{name}", vars(section)[name]  # without recording a read
        default = info.get_default(call_default_factory=True, validated_data={})
        rules = [rule for rule in info.metadata if isinstance(rule, ReadWhen)]
        obstacles = [*outer, *((why, rule) for rule in rules if (why := rule.obstacle(chain)))]
        if obstacles and not (isinstance(value, Section) and isinstance(default, Section)):
            yield UnreadKey(here, value, default, *obstacles[0])
            continue
        for inner_path, inner in _sections(here, value):
            yield from _unread((*chain, inner), f"{inner_path}.", obstacles[:1])


def _sections(path: str, value: Any) -> Iterator[tuple[str, Section]]:
    """Yield the sections that a key holds: itself, or the items of a list or mapping."""
    items = [(path, value)]
    if isinstance(value, dict):
        items = [(f"{path}.{name}", item) for name, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    yield from ((key, item) for key, item in items if isinstance(item, Section))


def as_written(value: Any) -> str:
    """Return a value as a recipe writes it. Of sections, only keys that are set."""
    data = TypeAdapter(Any).dump_python(value, exclude_defaults=True)
    if isinstance(value, list):  # an item with nothing set still has a name
        data = [{"use": item.use} if plain == {} else plain for plain, item in zip(data, value, strict=True)]
    return yamlfile.dump(data, flow=True)
