"""The command line. The files of commands are imported in the order of `practicum --help`."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from practicum.commands import model_commands, recipe_commands, run_commands
from practicum.commands.command_app import app

__all__ = ["app", "main", "model_commands", "recipe_commands", "run_commands"]


def main() -> None:
    try:
        app(prog_name="practicum")
    except SystemExit as stop:
        if not isinstance(stop.code, int):
            raise
        _leave(stop.code)


def _leave(code: int) -> NoReturn:
    """End the process as the interpreter does, but do not free its objects one by one: torch has many."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
