"""Import the functions and objects that a recipe names as package.module:name."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from practicum.errors import RecipeError
from practicum.user_code import error_line, frames

_USE = re.compile(r"(?:(?P<folder>.*)/)?(?P<module>\w+(?:\.\w+)*):(?P<name>\w+)")
_used_folders: set[Path] = set()
"""Folders from which functions were imported."""


def split_function(use: str) -> tuple[str, str, str] | None:
    """Split `[folder/]package.module:function` into folder ("" if none), module and function, or return
    None."""
    match = _USE.fullmatch(use)
    return (match["folder"] or "", match["module"].removesuffix(".py"), match["name"]) if match else None


def module_file(folder: Path, module: str) -> Path | None:
    """Return the file of a module in a folder, or None."""
    stem = folder.joinpath(*module.split("."))
    return next((f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.is_file()), None)


def import_function(use: str, path: str) -> Callable[..., Any]:
    """Import the function that `use` names, as `import_object` does."""
    function = import_object(use, path, "function")
    if not callable(function) or isinstance(function, type):
        raise RecipeError(path, f"{use!r}, a {type(function).__name__}", "a function")
    return function


def import_object(use: str, path: str, what: str = "name") -> Any:
    """Import the object that `use` names. Modules in its folder or the working directory come first.

    Errors name `path` and `what`.
    """
    parts = split_function(use)
    if parts is None:
        raise RecipeError(path, repr(use), f"package.module:{what}", meant(use, ()))
    folder, module_name, attribute = parts
    module = _import(module_name, Path(folder).absolute(), use, path)
    if not hasattr(module, attribute):
        near = get_close_matches(attribute, vars(module), n=1)
        hint = f"did you mean {module_name}:{near[0]}?" if near else ""
        raise RecipeError(path, repr(use), f"a {what} of module {module_name}", hint)
    return getattr(module, attribute)


def _import(module_name: str, folder: Path, use: str, path: str) -> Any:
    if sys.path[:1] != [str(folder)]:
        sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    _forget_namesakes(module_name, folder)
    _used_folders.add(folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, module_name.partition(".")[0]):  # imported by the user's module
            raise not_imported(error, f"{module_name} from {folder}", use, path) from None
        near = get_close_matches(module_name, [file.stem for file in folder.glob("*.py")], n=1)
        hint = f"no module {module_name} exists in {folder}, and none is installed"
        hint += f"; did you mean {near[0]}:{use.rpartition(':')[2]}?" if near else ""
        raise RecipeError(path, repr(use), "a module that can be imported", hint) from None
    except (Exception, SystemExit) as error:
        raise not_imported(error, f"{module_name} from {folder}", use, path) from None


def not_imported(error: BaseException, module: str, use: str, path: str) -> RecipeError:
    """Return an error with the exception that importing the module of `use` raised, and the user's frames."""
    hint = f"importing {module} raised {error_line(error)}\n{frames(error, '    ')}".rstrip()
    return RecipeError(path, repr(use), "a module that can be imported", hint)


def _forget_namesakes(module_name: str, folder: Path) -> None:
    """Remove modules of another recipe's folder from sys.modules if this folder has modules of that name."""
    others = _used_folders - {folder}
    stale = {file.stem for file in folder.glob("*.py") if _home(file.stem) in others}
    package = module_name.partition(".")[0]
    if module_file(folder, module_name) and package not in sys.stdlib_module_names:
        stale |= {package} if _home(package) not in (None, folder) else set()
    for name in [name for name in sys.modules if name.partition(".")[0] in stale]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _home(package: str) -> Path | None:
    """Return the folder that a module was imported from, or None."""
    module = sys.modules.get(package)
    file = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    return None if file is None else Path(file).absolute().parent


def meant(use: str, known: Iterable[str]) -> str:
    """Return a suggestion for a name without a colon: a built-in name, or module:function."""
    if near := get_close_matches(use, known, n=1):
        return f"did you mean {near[0]}?"
    module, _, function = use.rpartition(".")
    return f"did you mean {module}:{function}?" if module and function else ""
