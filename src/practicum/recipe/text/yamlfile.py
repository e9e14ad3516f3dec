"""YAML as recipes want it: 1e-5 is a number, off is a word, each key comes once, with its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from practicum.errors import RecipeError

_TAG = "tag:yaml.org,2002:"
_FLOAT = (
    r"[-+]?(?:\d+(?:_\d+)*\.?(?:\d+(?:_\d+)*)?|\.\d+(?:_\d+)*)(?:[eE][-+]?\d+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?\d+(?:_\d+)*", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)
_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "null": lambda text: None,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "int": int,
    _TAG + "float": lambda text: float(re.sub(r"\.(?=[iInN])", "", text)),
    _TAG + "str": str,
}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars; PyYAML's own (1.1) make 1e-5 text, off a boolean and 1:30 a number."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  PyYAML's own name and type


class _Dumper(yaml.SafeDumper):
    """Quotes all text that this loader or a YAML 1.1 parser would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        # Double quotes keep all kinds of line breaks, on one line; PyYAML's other styles lose some.
        style = '"' if text and text.splitlines() != [text] else None
        return self.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


for _name, _pattern, _first in _RESOLVERS:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


@dataclass
class Document:
    """A parsed file: plain data, and the line of each dotted path."""

    data: Any
    lines: dict[str, int] = field(default_factory=dict)


def parse(text: str, name: str) -> Document:
    """Parse one YAML document; whatever is wrong is a RecipeError with `name`, line and column."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        document = Document(None)
        if node is not None:
            document.data = _plain(node, (), document.lines, name, set())
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, name) from None
    except yaml.reader.ReaderError as error:
        found = f"the character {chr(error.character)!r} at position {error.position}"
        raise RecipeError(name, found, "printable text in UTF-8") from None
    except RecursionError:
        raise RecipeError(name, "YAML nested too deeply", "a few levels") from None
    return document


def dump(data: Any, *, flow: bool = False) -> str:
    """Write plain data so that `parse` reads the same; `flow` puts it on one line."""
    text = yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=10**9 if flow else 96,
    )
    return text.removesuffix("...\n").rstrip("\n") if flow else text


def _plain(node: yaml.Node, path: tuple[str, ...], lines: dict[str, int], name: str, active: set[int]) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, name)
    if id(node) in active:
        raise RecipeError(_place(node, name), "an alias inside itself", "data without a cycle")
    active.add(id(node))
    try:
        if isinstance(node, yaml.SequenceNode):
            return [_plain(item, (*path, str(i)), lines, name, active) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        data: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = _key(key_node, name)
            line = key_node.start_mark.line + 1
            if key in data:
                raise RecipeError(
                    _place(key_node, name),
                    f"the key {key!r} again (first in line {first_line[key]})",
                    "each key once",
                    "keep one of the two",
                )
            first_line[key] = line
            lines[".".join((*path, key))] = line
            data[key] = _plain(value_node, (*path, key), lines, name, active)
        return data
    finally:
        active.discard(id(node))


def _scalar(node: yaml.ScalarNode, name: str) -> Any:
    convert = _SCALARS.get(node.tag)
    if convert is None:
        tag = node.tag.removeprefix(_TAG)
        raise RecipeError(_place(node, name), f"the YAML tag {tag!r}", "plain YAML without tags")
    try:
        return convert(node.value)
    except ValueError:
        raise RecipeError(
            _place(node, name), repr(node.value), f"a value of type {node.tag.removeprefix(_TAG)}"
        ) from None


def _key(node: yaml.Node, name: str) -> str:
    key = _scalar(node, name) if isinstance(node, yaml.ScalarNode) else None
    if not isinstance(key, str):
        found = (
            f"the key {node.value}"
            if isinstance(node, yaml.ScalarNode)
            else "a key that is a list or a mapping"
        )
        raise RecipeError(_place(node, name), found, "text as a key", "put it in quotes")
    if "." in key:
        outer, inner = key.rsplit(".", 1)
        advice = f"nest it: {inner} inside {outer}"
        raise RecipeError(_place(node, name), f"the key {key!r}", "a key without dots", advice)
    return key


def _place(node: yaml.Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _syntax_error(error: yaml.MarkedYAMLError, name: str) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    problem = error.problem or "text that can't be read"
    advice = ""
    if "'\\t'" in problem:
        advice = "indent with spaces, not tabs"
    elif "mapping values are not allowed" in problem:
        advice = "put text that holds ': ' in quotes, and check the indentation"
    elif "expected a single document" in str(error):
        problem, advice = "a second document", "a file holds one recipe: remove the line '---'"
    return RecipeError(place, f"a YAML syntax error ({problem})", "valid YAML", advice)
