"""Import the functions and objects that a recipe names as package.module:name."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType
from typing import Any

from practicum.errors import RecipeError
from practicum.user_code import error_line, frames

_USE = re.compile(r"(?:(?P<folder>.*)/)?(?P<module>\w+(?:\.\w+)*):(?P<name>\w+)")
_used_folders: set[Path] = set()
"""Folders from which functions were imported."""
_MAIN = "__main__"
_passed: dict[str, Any] = {}
"""Functions of a script or notebook, which other processes can't import, by their name in recipes."""


def split_function(use: str) -> tuple[str, str, str] | None:
    """Split `[folder/]package.module:function` into folder ("" if none), module and function, or None."""
    match = _USE.fullmatch(use)
    return (match["folder"] or "", match["module"].removesuffix(".py"), match["name"]) if match else None


def module_file(folder: Path, module: str) -> Path | None:
    """Return the file of a module in a folder, or None."""
    stem = folder.joinpath(*module.split("."))
    return next((f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.is_file()), None)


def name_function(function: Any) -> str:
    """Return the name of a function in a recipe: package.module:function if any process can import it. Others
    (of a script or notebook, lambdas, closures) are kept in this process as __main__:function."""
    made_of = getattr(function, "run", function)  # a stage is an object that holds its function
    name, module_name = getattr(made_of, "__qualname__", type(made_of).__name__), str(made_of.__module__)
    if module_name != _MAIN and getattr(sys.modules.get(module_name), name, None) is function:
        file = Path(getattr(sys.modules[module_name], "__file__", None) or "").absolute()
        roots = [folder for folder in file.parents if module_file(folder, module_name) == file]
        if not roots or roots[0] in map(Path, sysconfig.get_paths().values()):
            return f"{module_name}:{name}"
        return f"{roots[0]}/{module_name}:{name}"
    plain = use = f"{_MAIN}:{re.sub(r'[^0-9A-Za-z_]', '', name.rpartition('.')[2]) or 'function'}"
    number = 1
    while not _is_same(_passed.setdefault(use, function), function):
        number += 1
        use = f"{plain}_{number}"
    return use


def _is_same(one: Any, other: Any) -> bool:
    """Return True for a function and a copy of it. A notebook cell that runs again defines a copy."""
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return one is other
    codes, settings = ([f.__code__ for f in (one, other)], [repr(f.__defaults__) for f in (one, other)])
    is_closure = one.__closure__ is not None or other.__closure__ is not None
    copied = codes[0] == codes[1] and settings[0] == settings[1] and one.__globals__ is other.__globals__
    return one is other or (copied and not is_closure)


def passed_functions(recipe: str) -> dict[str, Any]:
    """Return the functions in a recipe, as JSON, that other processes must be passed, by their names."""
    return {use: function for use, function in _passed.items() if f'"{use}"' in recipe}


def take_functions(functions: Mapping[str, Any]) -> None:
    """Make another process's `passed_functions` known in this one."""
    _passed.update(functions)


def import_function(use: str, path: str) -> Callable[..., Any]:
    """Import the function that `use` names, as `import_object` does."""
    function = import_object(use, path, "function")
    if not callable(function) or isinstance(function, type):
        raise RecipeError(path, f"{use!r}, a {type(function).__name__}", "a function")
    return function


def import_object(use: str, path: str, what: str = "name") -> Any:
    """Import the object that `use` names, from its folder or the working directory first."""
    parts = split_function(use)
    if parts is None:
        raise RecipeError(path, repr(use), f"package.module:{what}", meant(use, ()))
    folder, module_name, attribute = parts
    if module_name == _MAIN:
        if use not in _passed and not hasattr(sys.modules[_MAIN], attribute):
            hint = "run it there, or put the function into a module: package.module:function"
            raise RecipeError(path, repr(use), "a function of the script or notebook that is running", hint)
        return _passed.setdefault(use, getattr(sys.modules[_MAIN], attribute, None))  # for other processes
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
