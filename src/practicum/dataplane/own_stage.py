"""A stage of the user's, with fields of its own: what `practicum.parts.stage` makes of a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from practicum.dataplane.fields import FIELDS, Field, register_field
from practicum.dataplane.stages import Ranks, StageSpec
from practicum.errors import RecipeError, StoreError


@dataclass(frozen=True, slots=True)
class OwnStage:
    """`run(rank, batch, columns, step)` runs after the stage `after`, where the student learns.

    `writes` are fields of its own, and names of fields that there are.
    """

    run: Callable[..., Any]
    name: str
    after: str
    reads: tuple[str, ...]
    writes: tuple[str | Field, ...]
    ranks: Ranks
    about: str

    def spec(self, use: str) -> StageSpec:
        """Its line of the stage table; from now on this process knows its fields.

        `use` is how the recipe names it.
        """
        for written in self.writes:
            if isinstance(written, Field):
                _register(written, use)
        names = tuple(written if isinstance(written, str) else written.name for written in self.writes)
        if unknown := [name for name in names if name not in FIELDS]:
            near = get_close_matches(unknown[0], FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "declare one of its own: writes=[Field(…)]"
            raise RecipeError("stages", f"{use!r}, which writes {unknown[0]!r}", "a field that exists", hint)
        return StageSpec(self.name, self.reads, names, "", self.ranks, True, self.about, use=use)


def _register(field: Field, use: str) -> None:
    expected = "a field with a name, a dtype, a shape and a padding rule that can be"
    try:
        register_field(field)
    except StoreError as error:
        raise RecipeError("stages", f"{use!r}, whose {error}", expected) from None
    if field.padding is None:
        hint = "give it padding= end_token, zero, positions or empty: what a row that fills up a batch holds"
        raise RecipeError("stages", f"{use!r}, whose field {field.name} has no padding rule", expected, hint)
