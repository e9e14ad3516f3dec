"""practicum post-trains language models: reinforcement learning and on-policy distillation in one trainer.

`import practicum as pr` has the functions of docs/python.md. They are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from practicum.api import (
        LoadedRecipe,
        PracticumError,
        Report,
        Run,
        check,
        evaluate,
        load_recipe,
        open_run,
        sample,
        train,
    )

__all__ = [
    "LoadedRecipe",
    "PracticumError",
    "Report",
    "Run",
    "__version__",
    "check",
    "evaluate",
    "load_recipe",
    "open_run",
    "sample",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from practicum import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
