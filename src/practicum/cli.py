"""The command line. The files of commands are imported in the order of `practicum --help`."""

from practicum.commands import model_commands, recipe_commands, run_commands
from practicum.commands.command_app import app
from practicum.commands.ending import end_in_time

__all__ = ["app", "main", "model_commands", "recipe_commands", "run_commands"]


def main() -> None:
    """Entry point of the `practicum` command."""
    code = 1
    try:
        app(prog_name="practicum")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        end_in_time(code)
