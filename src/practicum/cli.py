"""The command line. The files of commands are imported in the order of `practicum --help`."""

import atexit
import gc

from practicum.commands import model_commands, recipe_commands, run_commands
from practicum.commands.command_app import app

__all__ = ["app", "main", "model_commands", "recipe_commands", "run_commands"]


def main() -> None:
    # Otherwise the interpreter scans all objects several times at exit.
    atexit.register(gc.freeze)
    app(prog_name="practicum")
