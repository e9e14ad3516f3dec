"""The command line. The files of commands are imported in the order of `practicum --help`."""

import atexit
import gc

from practicum.commands import model_commands, recipe_commands, run_commands
from practicum.commands.command_app import app

__all__ = ["app", "main", "model_commands", "recipe_commands", "run_commands"]

RARE_FULL_COLLECTION = 100
"""Collections of younger objects between two of all objects, by default 10."""


def main() -> None:
    # Otherwise the interpreter scans all objects several times: while modules are imported, and at exit.
    gc.set_threshold(*gc.get_threshold()[:2], RARE_FULL_COLLECTION)
    atexit.register(gc.freeze)
    app(prog_name="practicum")
