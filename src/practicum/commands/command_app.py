"""The typer app of all commands, shared options, and the display of errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from practicum import __version__
from practicum.errors import PracticumError, machine_trouble


class _Commands(TyperGroup):
    """Prints the message of a PracticumError to stderr, without a traceback."""

    # Any: some versions of typer include their own click with another class Context.
    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                os.getcwd()
            except FileNotFoundError:
                raise PracticumError(
                    "the current directory no longer exists: change to another one"
                ) from None
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            typer.echo("stopped", err=True)
            raise typer.Exit(128 + getattr(stop, "number", signal.SIGINT)) from None
        except Exception as error:
            text = str(error) if isinstance(error, PracticumError) else machine_trouble(error)
            if isinstance(error, PermissionError | NotADirectoryError):
                text = f"{error.filename}: {error.strerror}"
            if text is None:
                raise
            typer.echo("\n".join([text, *getattr(error, "__notes__", [])]), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Post-train language models: reinforcement learning and on-policy distillation.",
    epilog="Start with `practicum demo`, then `practicum recipes`. Examples are for a checkout; elsewhere, "
    "`practicum init sort recipes/sort` brings their files. "
    "Exit codes: 0 done, 2 a user error, 130 or 143 interrupted, 1 an internal error. diff and replay exit "
    "with 1 if numbers differ, doctor if a check fails.",
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value, written as YAML: --set train.lr=1e-5. May be repeated.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def say_loading(what: str = "torch") -> None:
    """Print that a slow import starts."""
    typer.echo(f"loading {what} …", err=True)
