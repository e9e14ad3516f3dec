"""Commands that inspect runs and this machine: view, diff, replay and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from practicum.commands.command_app import Overrides, app, say_loading


@app.command()
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run folders, or folders of runs. Default: ./runs."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="Port. Default: 8765, or a free one if that is in use."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs in a browser, live or finished.

    The page has curves, teachers, responses, tokens, stages, the recipe and the log. Only this machine can
    open it. Ctrl-C stops the server.
    """
    from practicum.observe.view.serve_view import find_runs, serve_runs

    serve_runs(find_runs(runs or []), port, typer.echo, open_browser=browser)


@app.command(no_args_is_help=True)
def diff(
    one: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    two: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.")],
) -> None:
    """Compare two runs: recipe keys, and the first difference in their numbers.

    Shows recipe keys that differ, then the first step, row and field whose numbers differ. Times are not
    compared. The exit code is 1 if numbers differ, else 0.
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
    step: Annotated[int, typer.Option("--step", metavar="N", min=1, help="The step to repeat.")],
    overrides: Overrides = None,
) -> None:
    """Repeat the update of a recorded step, and compare.

    Starts from the recorded batch and the checkpoint before the step. With the run's recipe, the update must
    be equal bit for bit. With --set, shows the changes in loss, gradient, clipped tokens and teachers. The
    exit code is 1 if the same recipe has other numbers.
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
    """Check this machine and practicum's numerics on it, in under a minute.

    Reports devices, memory, versions, speeds, and steps of a tiny model: packed against plain forward pass,
    engine against learner, float32 and bfloat16, vLLM if installed. Paste the table into an issue. The exit
    code is 1 if a check fails.
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
