"""Functions of the user's that a recipe names as package.module:function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from practicum.errors import RecipeError


def import_function(use: str, path: str) -> Callable[..., Any]:
    """The function that `use` names; modules of the working directory are found. `path` is for errors."""
    module_name, _, attribute = use.partition(":")
    if not (module_name and attribute):
        raise RecipeError(path, repr(use), "package.module:function")
    module = _import(module_name, use, path)
    function = getattr(module, attribute, None)
    if function is None:
        near = get_close_matches(attribute, vars(module), n=1)
        hint = f"did you mean {module_name}:{near[0]}?" if near else ""
        raise RecipeError(path, repr(use), f"a function of module {module_name}", hint)
    if not callable(function) or isinstance(function, type):
        raise RecipeError(path, f"{use!r}, a {type(function).__name__}", "a function")
    return function


def _import(module_name: str, use: str, path: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        hint = f"importing {module_name} from {here} raised {type(error).__name__}: {error}"
        raise RecipeError(path, repr(use), "a module that can be imported", hint) from error
