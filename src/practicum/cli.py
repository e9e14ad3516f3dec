"""The command line. Each command imports what it needs when it runs: help and the first line come at once."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from practicum import __version__
from practicum.errors import ClusterError, PracticumError, machine_trouble
from practicum.user_code import text_of


class _Commands(TyperGroup):
    """Shows a PracticumError as its sentences, on stderr, without a traceback."""

    # Any: some versions of typer bring their own click, whose Context is another class.
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PracticumError as error:
            lines = [text_of(error), *map(text_of, getattr(error, "__notes__", []))]
            typer.echo("\n".join(lines), err=True)
            raise typer.Exit(2) from None
        except (PermissionError, NotADirectoryError) as error:
            typer.echo(f"{error.filename}: {error.strerror}", err=True)
            raise typer.Exit(2) from None
        except Exception as error:
            if (trouble := machine_trouble(error)) is None:
                raise
            typer.echo("\n".join([trouble, *getattr(error, "__notes__", [])]), err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            typer.echo("stopped", err=True)
            raise typer.Exit(128 + getattr(stop, "number", signal.SIGINT)) from None


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
    "Exit codes: 0 done, 2 a mistake that a message names, 130 or 143 interrupted, 1 an error of practicum; "
    "of diff and replay: 1 numbers differ; of doctor: 1 something is wrong.",
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value, written as YAML: --set train.lr=1e-5. May be repeated.",
    ),
]


def main() -> None:
    """Entry point of the `practicum` command."""
    app(prog_name="practicum")


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


@app.command(no_args_is_help=True)
def train(
    recipes: Annotated[
        list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files, run one after another.")
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run folder's newest checkpoint.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace the run that the folder holds already.")
    ] = False,
    change: Annotated[
        bool,
        typer.Option(
            "--change", help="With --resume: continue with other values than the run had, and record them."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder, in place of runs/NAME.")
    ] = None,
    view: Annotated[
        bool, typer.Option("--view", help="Show the run in a browser meanwhile: prints the address.")
    ] = False,
) -> None:
    """Train by a recipe, or by several one after another.

    practicum train recipes/sort/start.yaml --set train.steps=20 --out runs/short
    """
    if resume and fresh:
        raise typer.BadParameter("--resume continues a run, --fresh replaces it: give one of them")
    if change and not resume:
        raise typer.BadParameter("--change is for a run that continues: give --resume as well")
    from practicum.recipe.load_recipe import load_recipe
    from practicum.trainer.run_folder import choose_folder

    loaded = [load_recipe(file, overrides or []) for file in recipes]
    folders = [choose_folder(one.recipe, out, resume=resume, fresh=fresh).path for one in loaded]
    with _viewed(folders) if view else nullcontext():
        _say_loading()
        from practicum.trainer.run import train_recipes

        outcomes = train_recipes(loaded, resume=resume, fresh=fresh, change=change, out=out)
    if (stopped := outcomes[-1].signal) is not None:
        raise typer.Exit(128 + stopped)


@app.command(no_args_is_help=True)
def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files, looked at one after another.")
    ],
    overrides: Overrides = None,
    static: Annotated[
        bool, typer.Option("--static", help="Only what can be known without loading anything.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also every value and where it came from, and the stages.")
    ] = False,
) -> None:
    """Say whether a recipe can run, and what it means, on one screen.

    First what was found in its files and model, then what differs from the defaults, then the sizes. What
    `train` would refuse is refused here.

    practicum check recipes/sort/start.yaml --set rollout.slots=64
    """
    from practicum import api

    all_loaded = [api.load_recipe(file, overrides or []) for file in files]
    if not static:
        _say_loading()
    more = "" if everything else "; --all shows every value and where it came from"
    for loaded in all_loaded:
        typer.echo(api.check(loaded, static=static).text(everything=everything))
        typer.echo(f"\nok{' (static part only)' if static else ''}{more}")


@app.command(no_args_is_help=True)
def explain(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Draw the stages of a step.

    Each with what it reads and writes; those that the recipe does not need, with the reason.

    practicum explain recipes/sort/grpo.yaml --set algorithm.kl.place=loss
    """
    from practicum.dataplane.stages import draw
    from practicum.recipe.load_recipe import load_recipe
    from practicum.roles.stage_table import make_plan
    from practicum.trainer.run_models import resolve_models

    loaded, _ = resolve_models(load_recipe(recipe, overrides or []), weights=False)
    typer.echo(f"A step of {loaded.recipe.name}\n\n{draw(make_plan(loaded.recipe))}")


@app.command(no_args_is_help=True)
def plan(
    recipe: RecipePath,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="Machines of a cluster (YAML); unset: this machine."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Folder of a finished run that corrects the forecast."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Forecast a step on a cluster.

    Who sits where, the memory of each device, the bytes that are moved, and the seconds of each stage with
    the one that takes longest. What does not fit is an error. With --cluster the roles are Ray actors.

    practicum plan recipes/sort/start.yaml --set runtime=ray --from runs/short
    """
    from practicum.forecast.cluster_spec import load_spec, this_machine
    from practicum.forecast.forecast import forecast
    from practicum.forecast.forecast_report import report
    from practicum.forecast.workload import mean_prompt_tokens, read_run
    from practicum.recipe.load_recipe import load_recipe
    from practicum.trainer.run_models import resolve_models

    on_ray = [] if cluster is None else ["runtime.kind=ray"]
    loaded, _ = resolve_models(load_recipe(recipe, [*(overrides or []), *on_ray]), weights=False)
    spec = this_machine() if cluster is None else load_spec(cluster)
    measured = None if run is None else read_run(run)
    found = forecast(loaded.recipe, spec, mean_prompt_tokens, measured)
    typer.echo(report(found))
    if found.refusals:
        raise ClusterError("\n".join(["", *found.refusals]))


@app.command()
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="JSON schema, for editors.")] = False,
) -> None:
    """Print every key that a recipe can have.

    With what it takes, its default and a sentence, as Markdown.

    practicum schema --json > recipe.schema.json
    """
    from practicum.recipe.text.show_recipe import json_schema, markdown

    typer.echo(json_schema() if as_json else markdown(), nl=as_json)


@app.command()
def tasks() -> None:
    """List the built-in tasks, with examples and options."""
    from practicum.tasks.builtin import describe_tasks

    for task in describe_tasks():
        answer = task.answer if len(task.answer) <= 60 else f"{task.answer[:59]}…"
        typer.echo(f"{task.name}: {task.about}")
        typer.echo(f"  example  {task.prompt!r} → {answer!r}")
        for option, about in task.options.items():
            typer.echo(f"  option   {option} = {about}")


@app.command()
def recipes() -> None:
    """List the recipes that come with practicum.

    With what each shows and what it should reach. `practicum init NAME` copies one.
    """
    from practicum.recipe.shipped import list_recipes

    for folder, group in list_recipes().items():
        typer.echo(f"{folder}")
        for recipe in group:
            typer.echo(f"  {recipe.name}: {recipe.about}")
            typer.echo(f"    expected: {recipe.expected}")
    typer.echo("\npracticum init NAME [DIR] copies a folder or one recipe, ready to change")


@app.command(no_args_is_help=True)
def init(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A folder, such as sort, or a recipe, sort/ppo.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where to put it; unset: ./NAME.")
    ] = None,
) -> None:
    """Copy recipes that come with practicum, ready to change.

    With their data, functions and README. Files that are there already are not written over.

    practicum init sort mine
    """
    from practicum.recipe.shipped import copy_recipe

    for sentence in copy_recipe(name, folder):
        typer.echo(sentence)


@app.command(name="eval", no_args_is_help=True)
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH", help="Folder, hub name, run or checkpoint to evaluate."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the scores as JSON; all else goes to stderr.")
    ] = False,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", metavar="FILE", help="Write the answers too, as lines of JSON."),
    ] = None,
) -> None:
    """Evaluate a model on the held-out prompts of a recipe.

    practicum eval recipes/sort/grpo.yaml --model runs/short/export
    """
    from practicum.recipe.load_recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    _say_loading()
    from practicum.trainer.evaluate import evaluate_recipe

    with _stdout_to_stderr() if as_json else nullcontext():
        scores = evaluate_recipe(loaded, model, quiet=as_json, answers=answers)
    if as_json:
        named = {"recipe": loaded.recipe.name, "model": model or loaded.recipe.model.path}
        typer.echo(json.dumps({**named, "scores": scores}, indent=2))


@app.command(no_args_is_help=True)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a checkpoint of one.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="Of this step; unset: the newest."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by the evaluations.")] = False,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="New folder; unset: RUN/exports/step-N.")
    ] = None,
) -> None:
    """Write a checkpoint's model in HuggingFace format.

    With its tokenizer, for everything that reads such folders. Needs no GPU.

    practicum export runs/short --to models/short
    """
    if best and step is not None:
        raise typer.BadParameter("--step and --best name two checkpoints: give one of them")
    _say_loading()
    from practicum.trainer.run_models import export_run

    checkpoint, folder = export_run(run, step, best, to)
    typer.echo(f"{checkpoint.name} → {folder}")


@app.command(no_args_is_help=True)
def diff(
    one: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    two: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.")],
) -> None:
    """Compare two runs: recipe keys, and the first number that differs.

    First the recipe keys that differ, then the first step, row and field whose numbers differ; times are not
    compared. Exit code 1 if numbers differ, 0 if they are equal.
    """
    from practicum.records.compare_runs import compare_runs, comparison_text

    found = compare_runs(one, two)
    typer.echo(comparison_text(found))
    if found.first is not None:
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
    _say_loading()
    from practicum.trainer.replay import replay_step, replay_text

    found = replay_step(run, step, overrides or [])
    typer.echo(replay_text(found))
    if not found.is_equal:
        raise typer.Exit(1)


@app.command(no_args_is_help=True)
def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder, hub name, run or checkpoint."),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Further options of `vllm serve`."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar="PRACTICUM_API_KEY", help="Key that requests must bring; better as variable."
        ),
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="With --host: let everybody use it, without a key.")
    ] = False,
    max_body_mb: Annotated[
        float | None,
        typer.Option("--max-body-mb", min=0.001, help="MiB of a request; unset: room for the context."),
    ] = None,
    connections: Annotated[int, typer.Option("--connections", min=1, help="Connections at once.")] = 256,
    engine: Annotated[
        str, typer.Option("--engine", help="torch, vllm, or auto: vLLM where it is installed.")
    ] = "auto",
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name on the server; unset: MODEL.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=2, help="Longest sequence; unset: the model's.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, bfloat16 or float64; unset: float32 on a CPU, else bfloat16."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads; unset: all cores.")
    ] = None,
    kv_gb: Annotated[
        float | None, typer.Option("--kv-gb", min=0.001, help="GiB of KV memory of vLLM on a CPU.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the server's log.")] = False,
) -> None:
    """Serve a model as a teacher, for recipes with `url`.

    Scores prompts by vLLM's form of /v1/completions, for this machine only unless --host says otherwise: then
    a key is required. Ctrl-C ends it.

    practicum serve runs/short/export --port 8000
    """
    given = {"--engine": (engine, ("auto", "torch", "vllm"))}
    given["--dtype"] = (dtype or "float32", ("float32", "bfloat16", "float64"))
    for option, (value, known) in given.items():
        if value not in known:
            raise typer.BadParameter(f"{option} is {value}, expected one of {', '.join(known)}")
    _say_loading(model)
    from practicum.serving.serve import ServeOptions
    from practicum.serving.serve import serve as run
    from practicum.trainer.run_models import model_folder

    folder = model_folder(model)
    name = name or (model if folder != model else None)
    options: Any = {"model": folder, "host": host, "port": port, "engine": engine, "name": name}
    options |= {"context": context, "dtype": dtype, "threads": threads, "kv_gb": kv_gb}
    options |= {"no_key": no_key, "max_body_mb": max_body_mb, "connections": connections}
    run(ServeOptions(**options, api_key=api_key, verbose=verbose, more=tuple(more or ())), typer.echo)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the demo's runs.")] = Path(
        "runs/mopd"
    ),
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="In place of the recipes' seed, 1.")
    ] = None,
) -> None:
    """Train specialists and one student of them all on this machine, in minutes.

    A tiny base model from demonstrations, a specialist for each of three domains by GRPO, then one student
    corrected by all three (on-policy distillation), and a table of who can do what. No GPU, no network.
    """
    _say_loading()
    from practicum.trainer.demo import run_demo

    run_demo(out, seed)


@app.command()
def doctor() -> None:
    """See what this machine has and whether practicum's numbers are right on it, in under a minute.

    Devices, memory, versions, speeds, and real steps of a tiny model: packed forward against the plain one,
    engine against learner, float32 and bfloat16, vLLM where it is installed. A table to paste into an issue;
    the exit code is 1 if something is wrong.
    """
    _say_loading()
    from practicum.trainer.doctor import examine

    wrong = 0
    for finding in examine():
        typer.echo(str(finding))
        wrong += finding.result == "wrong"
    if wrong:
        typer.echo(
            f"{wrong} of these are wrong: practicum can't be trusted on this machine as it is", err=True
        )
        raise typer.Exit(1)


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
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write one HTML file in place of serving.")
    ] = None,
) -> None:
    """Show runs in a browser, live or finished.

    Curves, teachers, answers, tokens, stages, the recipe and the log. For this machine only; Ctrl-C ends it.
    With --export all of it is one file that opens from disk.

    practicum view runs/short --export short.html
    """
    from practicum.view.serve_view import find_runs, serve_runs

    found = find_runs(runs or [])
    if export is not None:
        from practicum.view.export_page import export_page

        typer.echo(export_page(found, export))
        return
    serve_runs(found, port, typer.echo, open_browser=browser)


@contextmanager
def _viewed(folders: list[Path]) -> Iterator[None]:
    """The page over these runs while they train."""
    from practicum.view.serve_view import view_beside

    with view_beside(folders) as address:
        typer.echo(f"view: {address}")
        yield
    typer.echo(f"the page has ended with the run: practicum view {folders[-1]} opens it again")


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What anybody prints meanwhile goes to stderr: users' functions and other processes too."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _say_loading(what: str = "torch") -> None:
    """The first sign of life: importing torch takes seconds."""
    typer.echo(f"loading {what} …", err=True)


if __name__ == "__main__":
    main()
