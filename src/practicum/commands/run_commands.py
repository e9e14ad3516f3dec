"""Commands that look at runs, and at the machine that they run on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from practicum.commands.command_app import Overrides, app, say_loading


@app.command()
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run folders, or folders of runs; unset: those in ./runs."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Unset: 8765, or any free one if that is in use."),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs in a browser, live or finished.

    Curves, teachers, answers, tokens, stages, the recipe and the log. For this machine only; Ctrl-C ends it.
    """
    from practicum.observe.view.serve_view import find_runs, serve_runs

    serve_runs(find_runs(runs or []), port, typer.echo, open_browser=browser)


@app.command(no_args_is_help=True)
def diff(
    one: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    two: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.")],
) -> None:
    """Compare two runs: recipe keys, and the first number that differs.

    First the recipe keys that differ, then the first step, row and field whose numbers differ; times are not
    compared. Exit code 1 if numbers differ, 0 if they are equal.
    """
    from practicum.observe.records.compare_runs import compare_runs, comparison_text

    comparison = compare_runs(one, two)
    typer.echo(comparison_text(comparison))
    if comparison.first is not None:
        raise typer.Exit(1)


@app.command(no_args_is_help=True)
def replay(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, recorded with track.record: all.")
    ],
    step: Annotated[int, typer.Option("--step", metavar="N", min=1, help="The step to learn again.")],
    overrides: Overrides = None,
) -> None:
    """Learn from a recorded step again, and compare.

    Takes the recorded batch and the checkpoint before the step. The run's own recipe must give the same
    update bit for bit. With --set it shows what would have changed: loss, gradient, clipped tokens, teachers.
    Exit code 1 if the same recipe gives other numbers.
    """
    from practicum.observe.records.read_record import require_run

    require_run(run)
    say_loading()
    from practicum.trainer.replay import replay_step, replay_text

    replayed = replay_step(run, step, overrides or [])
    typer.echo(replay_text(replayed))
    if not replayed.is_equal:
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """See what this machine has and whether practicum's numbers are right on it, in under a minute.

    Devices, memory, versions, speeds, and real steps of a tiny model: packed forward against the plain one,
    engine against learner, float32 and bfloat16, vLLM where it is installed. A table to paste into an issue;
    the exit code is 1 if something is wrong.
    """
    say_loading()
    from practicum.commands.doctor import examine

    wrong = 0
    for finding in examine():
        typer.echo(str(finding))
        wrong += finding.result == "wrong"
    if wrong:
        typer.echo(
            f"{wrong} of these are wrong: practicum can't be trusted on this machine as it is", err=True
        )
        raise typer.Exit(1)
