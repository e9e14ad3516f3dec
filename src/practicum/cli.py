"""The command line. The files of commands are imported in the order of `practicum --help`."""

from practicum.commands import model_commands, recipe_commands, run_commands
from practicum.commands.command_app import app

__all__ = ["app", "main", "model_commands", "recipe_commands", "run_commands"]


def main() -> None:
    """Entry point of the `practicum` command."""
    app(prog_name="practicum")
