"""What every part of the recipe is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the recipe. Unknown keys are errors; a recipe is never changed after loading."""

    # Strict: "8" is not 8 and yes is not true. A recipe says what it means.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False
    )
