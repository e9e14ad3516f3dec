"""Show a recipe with the origins of its values, the screen of `check`, and the reference of keys."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from practicum.recipe.checks.unread_keys import as_written, unread_notes
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.section import Section
from practicum.recipe.text import yamlfile
from practicum.recipe.text.origins import DEFAULT
from practicum.recipe.text.type_text import find_key, keys_of, sections_of, step_name, takes

LINES, COLUMNS = 40, 100
_FINDINGS = 12
"""Maximum lines of findings without --all."""
_WIDEST = 38
"""Maximum columns of keys and values. Longer ones are cut."""


def resolved_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML, which loads to the same recipe from any folder."""
    return yamlfile.dump(recipe.model_dump(mode="json", exclude={"extends"}))


def show_recipe(loaded: LoadedRecipe) -> str:
    """Return the resolved recipe as YAML. Comments have each value's origin, or why it is not read."""
    lines = list(_lines(loaded.recipe.model_dump(mode="json"), "", "", origin_notes(loaded)))
    width = min(60, max(len(text) for text, _ in lines))
    return "\n".join(text if comment is None else f"{text:<{width}}  # {comment}" for text, comment in lines)


def origin_notes(loaded: LoadedRecipe) -> dict[str, str]:
    """Return the origin of each value, and why it is not read, by dotted path."""
    notes = {path: str(origin) for path, origin in loaded.origins.items()}
    for path, why in unread_notes(loaded.recipe).items():
        for leaf in notes:
            if leaf == path or leaf.startswith(f"{path}."):
                notes[leaf] += f", {why}"
    return notes


def _lines(
    data: Mapping[str, Any], path: str, indent: str, comments: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    for key, value in data.items():
        here = f"{path}.{key}" if path else key
        if here == "extends" and value is None:
            continue
        name = yamlfile.dump(key, flow=True)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", None
            yield from _lines(value, here, indent + "  ", comments)
        else:
            yield f"{indent}{name}: {yamlfile.dump(value, flow=True)}", comments.get(here, str(DEFAULT))


def markdown() -> str:
    """Return the reference in Markdown, with one table of keys per section."""
    return "\n".join(["# The recipe", "", *_section(Recipe, "")]).rstrip("\n") + "\n"


def json_schema() -> str:
    """Return the JSON schema of a recipe, for editors."""
    return json.dumps(Recipe.model_json_schema(), indent=2)


def _section(section: type[BaseModel], path: str) -> Iterator[str]:
    if path:
        yield from (f"## {path}", "")
    yield from ((section.__doc__ or "").strip(), "", "| key | takes | default | about |")
    yield "|---|---|---|---|"
    prefix = f"{path}." if path else ""
    inner = []
    nodes = keys_of(find_key((), section)[2], section)
    for name, info in section.model_fields.items():
        cells = [f"`{prefix}{name}`", takes(nodes[name], section), _default(info), info.description or ""]
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        step = prefix + step_name(info.annotation, name)
        inner += [(child, step) for child in sections_of(info.annotation)]
    yield ""
    for child, child_path in inner:
        yield from _section(child, child_path)


def _default(info: FieldInfo) -> str:
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "**required**"
    if isinstance(value, BaseModel):
        return "see below"
    return f"`{yamlfile.dump(TypeAdapter(Any).dump_python(value, mode='json'), flow=True)}`"


def screen(
    loaded: LoadedRecipe,
    warnings: Sequence[str],
    sizes: Sequence[str],
    findings: Sequence[str],
    *,
    everything: bool = False,
) -> str:
    """Return the summary, cut to about 40 lines of 100 columns unless `everything` is set."""
    head = [f"{loaded.recipe.name}: {loaded.source}", ""]
    head += _block("will run", [line for text in sizes for line in _wrapped(text)])
    head += _block("warnings", [line for text in warnings for line in _wrapped(text)])
    finding_lines = [line for text in findings for line in _wrapped(text)]
    finding_lines = _block("findings", finding_lines if everything else _cut(finding_lines, _FINDINGS))
    room = LINES - len(head) - len(finding_lines) - 4
    notes, cells = unread_notes(loaded.recipe), [("key", "value", "default")]
    for path, value, default in _changed(loaded.recipe, ""):
        note = f" ({notes[path]})" if path in notes else ""
        known = "" if default is PydanticUndefined else _nearby(as_written(default))
        cells.append((path, f"{_nearby(as_written(value))}{note}", known))
    rows = _columns(cells)
    rows = rows if everything else _cut(rows, max(8, room))
    changed = _block("differs from the defaults", rows if rows[1:] else ["nothing"])
    return "\n".join([*head, *changed, *finding_lines])


def _changed(section: Section, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value and default. Tasks, teachers and optional sections take one line each."""
    for name, info in type(section).model_fields.items():
        here, value = f"{path}{name}", getattr(section, name)
        default = info.get_default(call_default_factory=True, validated_data={})
        if here in ("name", "extends", "expected") or value == default:
            continue
        if isinstance(value, Section) and (isinstance(default, Section) or default is PydanticUndefined):
            yield from _changed(value, f"{here}.")
        elif isinstance(value, Mapping) and any(isinstance(item, Section) for item in value.values()):
            yield from ((f"{here}.{key}", item, PydanticUndefined) for key, item in value.items())
        else:
            yield here, value, default


def _nearby(text: str) -> str:
    """Shorten paths in the working directory to relative ones."""
    here = str(Path.cwd())
    return text.replace(f"{here}/", "") if here != "/" else text


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Align keys, values and defaults in columns. A value may fill the column of an empty default."""
    first = min(_WIDEST, max(len(key) for key, _, _ in rows))
    second = min(_WIDEST, max(len(value) for _, value, default in rows if default))
    lines = []
    for key, value, default in rows:
        widths = first, second if default else COLUMNS - first - 4, COLUMNS - first - second - 6
        cells = zip((key, value, default), widths, strict=True)
        texts = [text if len(text) <= width else f"{text[: width - 1]}…" for text, width in cells]
        lines.append("  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip())
    return lines


def _wrapped(text: str) -> list[str]:
    # Paths are not cut, so that users can copy them.
    wrap = partial(textwrap.wrap, break_on_hyphens=False, break_long_words=False)
    return wrap(_nearby(text), COLUMNS - 2, subsequent_indent="  ") or [""]


def _cut(lines: list[str], most: int) -> list[str]:
    left = len(lines) - most + 1
    return lines if len(lines) <= most else [*lines[: most - 1], f"… {left} more lines with --all"]


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []
