"""Base class of recipe sections, and the rules by which a key declares when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from practicum.recipe.own_parts import registered_names
from practicum.recipe.user_functions import split_function


class Section(BaseModel):
    """A section of the recipe. Unknown keys are errors, and a loaded recipe is immutable."""

    # Strict: "8" is not 8 and yes is not true.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False
    )


def own_name(name: str) -> str:
    if split_function(name) is None and name not in registered_names():
        raise ValueError("neither package.module:name nor a registered name")
    return name


OwnName = Annotated[str, AfterValidator(own_name)]
"""Name of a custom part: package.module:name, or a name registered by an installed package."""


def or_short_form(name: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that lets a section's JSON schema also accept the plain value of its key `name`."""

    def change(schema: dict[str, Any]) -> None:
        mapping = dict(schema)
        schema.clear()
        schema["anyOf"] = [mapping["properties"][name], mapping]

    return change


Chain = Sequence[Any]
"""The sections around a key, from the recipe to the key's section."""


@dataclass(frozen=True, slots=True)
class ReadWhen:
    """When a key is read, declared with the key. `checks/unread_keys.py` evaluates it.

    `obstacle` returns why nothing reads the key, such as "with url", or None. If the key is set anyway, it is
    an error if `refused`, otherwise a note of `practicum check`: one recipe may serve several kinds of runs.
    """

    obstacle: Callable[[Chain], str | None]
    advice: str = ""
    refused: bool = True


def key(default: Any, about: str, *rules: ReadWhen, **bounds: Any) -> Any:
    """Declare a key: its default (... if required), description, rules when it is read, and bounds."""
    info = Field(default, description=about, **bounds)
    info.metadata.extend(rules)
    return info


def read_with(key: str, *values: Any, advice: str = "", refused: bool = True) -> ReadWhen:
    """Read if another key has one of these values or, without values, is set, true or not 0.

    A key is a path from the recipe, or relative: .url is in the same section, ..x in the enclosing one.
    """

    def obstacle(chain: Chain) -> str | None:
        value, name = _look_up(chain, key), key.lstrip(".")
        if value in values if values else value:
            return None
        text = {True: "true", False: "false"}[value] if isinstance(value, bool) else value
        return f"without {name}" if value in (None, "", [], {}) else f"with {name} {text}"

    choice = f" to {' or '.join(map(str, values))}" if values else ""
    return ReadWhen(obstacle, advice or f"remove it, or set {key.lstrip('.')}{choice}", refused)


def read_without(key: str, advice: str = "") -> ReadWhen:
    """Read if another key, given as for `read_with`, is not set."""
    name = key.lstrip(".")
    advice = advice or f"remove it, or {name}"
    return ReadWhen(lambda chain: None if _look_up(chain, key) is None else f"with {name}", advice)


def read_if(
    condition: Callable[[Any], object],
    why: str,
    advice: str = "remove it",
    *,
    of_section: bool = False,
    refused: bool = True,
) -> ReadWhen:
    """Read if a condition of the recipe or of the key's section holds. `why` may contain {0.key}."""

    def obstacle(chain: Chain) -> str | None:
        subject = chain[-1] if of_section else chain[0]
        return None if condition(subject) else why.format(subject)

    return ReadWhen(obstacle, advice, refused)


def _look_up(chain: Chain, key: str) -> Any:
    name = key.lstrip(".")
    dots = len(key) - len(name)
    value = chain[-dots] if dots else chain[0]
    for step in name.split("."):
        value = getattr(value, step, None)  # sections share rules, and a student has no url
    return value
