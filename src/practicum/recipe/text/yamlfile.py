"""Read and write YAML 1.2 with ruamel.yaml: plain data without tags, with the line of each key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter

from practicum.errors import RecipeError

_TAG = "tag:yaml.org,2002:"
_WORD = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z_/][\w./-]*(?: [\w./-]+)*", re.IGNORECASE)
"""Strings that need no quotes in YAML 1.1 and 1.2."""


class _Constructor(RoundTripConstructor):
    """Loads dates as strings."""


class _Representer(SafeRepresenter):
    """Writes values that YAML 1.1 and 1.2 read alike, such as quoted strings and 1.0e-05."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(representer: _Representer, text: str) -> Any:
    return representer.represent_scalar(_TAG + "str", text, style=None if _WORD.fullmatch(text) else '"')


def _number(representer: _Representer, number: float) -> Any:
    # NaN, which no key allows, is written as a string.
    text = repr(number).replace("inf", ".inf")
    return representer.represent_scalar(_TAG + "float", re.sub(r"^(-?\d+)e", r"\1.0e", text))


_Constructor.add_constructor(_TAG + "timestamp", RoundTripConstructor.construct_yaml_str)
_Representer.add_representer(str, _text)
_Representer.add_representer(float, _number)


@dataclass
class Document:
    """A parsed file, with the line of each dotted path."""

    data: Any
    lines: dict[str, int] = field(default_factory=dict)


def parse(text: str, name: str) -> Document:
    """Parse one YAML document. Errors are RecipeErrors with `name`, line and column."""
    reader = YAML()
    reader.Constructor = _Constructor
    document = Document(None)
    try:
        document.data = _plain(reader.load(text), (), document.lines, name, name)
    except MarkedYAMLError as error:
        raise _syntax_error(error, name, text) from None
    except ReaderError as error:
        found = f"the character {error.character!r} at position {error.position}"
        raise RecipeError(name, found, "printable text in UTF-8") from None
    except ValueError as error:
        raise RecipeError(name, f"a value that its tag does not allow ({error})", "plain YAML") from None
    except RecursionError:
        raise RecipeError(name, "YAML nested too deeply", "a few levels") from None
    return document


def dump(data: Any, *, flow: bool = False) -> str:
    """Write plain data for `parse`. `flow` writes one line."""
    writer = YAML(typ="safe", pure=True)
    writer.Representer = _Representer
    writer.default_flow_style, writer.allow_unicode = flow, True
    writer.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]
    writer.width = 10**9 if flow else 96
    out = StringIO()
    writer.dump(data, out)
    return out.getvalue().removesuffix("...\n").rstrip("\n") if flow else out.getvalue()


def _plain(value: Any, path: tuple[str, ...], lines: dict[str, int], name: str, place: str) -> Any:
    """Return plain data, and store the lines of its keys. `place` is the location of the value's key."""
    if isinstance(value, CommentedSeq):
        return [_plain(item, (*path, str(n)), lines, name, place) for n, item in enumerate(value)]
    if isinstance(value, CommentedMap):
        data = {}
        for key, inner in value.items():
            line, column = value.lc.data[key][:2] if key in (value.lc.data or {}) else (value.lc.line, 0)
            here = f"{name}:{line + 1}:{column + 1}"
            if not isinstance(key, str):
                raise RecipeError(here, f"the key {key}", "a string as a key", "put it in quotes")
            if "." in key:
                advice = f"nest it: {key.rpartition('.')[2]} inside {key.rpartition('.')[0]}"
                raise RecipeError(here, f"the key {key!r}", "a key without dots", advice)
            lines[".".join((*path, key))] = line + 1
            data[str(key)] = _plain(inner, (*path, key), lines, name, here)
        return data
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise RecipeError(place, f"the YAML tag {value.tag.value!r}", "plain YAML without tags")


def _syntax_error(error: MarkedYAMLError, name: str, text: str) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    problem, advice = error.problem or "text that can't be read", ""
    if isinstance(error, DuplicateKeyError):
        word = problem.partition('"')[2].partition('"')[0]
        start, above = (f"{' ' * mark.column}{word}:", text.splitlines()[: mark.line]) if mark else ("", [])
        same = [number for number, line in enumerate(above, 1) if line.startswith(start)]
        first = f", first in line {same[-1]}" if same else ""
        return RecipeError(place, f"the key {word!r} again{first}", "each key once", "keep one of the two")
    if "'\\t'" in problem:
        advice = "indent with spaces, not tabs"
    elif "mapping values are not allowed" in problem:
        advice = "quote strings that contain ': ', and check the indentation"
    elif "expected a single document" in str(error):
        problem, advice = "a second document", "a file holds one recipe: remove the line '---'"
    return RecipeError(place, f"a YAML syntax error ({problem})", "valid YAML", advice)
