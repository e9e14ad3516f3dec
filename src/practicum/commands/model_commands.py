"""Commands that train, evaluate, export and serve models."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from practicum.commands.command_app import Overrides, RecipePath, app, say_loading


@app.command(no_args_is_help=True)
def train(
    recipes: Annotated[
        list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files, run one after another.")
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run folder's newest checkpoint.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace an existing run in the folder.")] = False,
    change: Annotated[
        bool,
        typer.Option(
            "--change", help="With --resume: allow values that differ from the run's, and record them."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder. Default: runs/NAME.")
    ] = None,
    view: Annotated[
        bool,
        typer.Option("--view", help="Serve a page about the run while it trains, and print its address."),
    ] = False,
) -> None:
    """Train a recipe, or several one after another.

    practicum train recipes/sort/start.yaml --set train.steps=20 --out runs/short
    """
    if resume and fresh:
        raise typer.BadParameter("use either --resume, which continues a run, or --fresh, which replaces it")
    if change and not resume:
        raise typer.BadParameter("--change needs --resume")
    from practicum.recipe.load_recipe import load_recipe
    from practicum.trainer.run_folder import choose_folder, folder_of

    loaded = [load_recipe(file, overrides or []) for file in recipes]
    folders = [out or folder_of(item.recipe) for item in loaded]
    for folder in folders:
        choose_folder(folder, resume=resume, fresh=fresh)
    with _viewed(folders) if view else nullcontext():
        say_loading()
        from practicum.trainer.run import train_recipes

        outcomes = train_recipes(loaded, resume=resume, fresh=fresh, change=change, out=out)
    if (stopped := outcomes[-1].signal) is not None:
        raise typer.Exit(128 + stopped)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the demo's runs.")] = Path(
        "runs/mopd"
    ),
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Random seed. Default: the recipes', 1.")
    ] = None,
) -> None:
    """Train three specialists and distil them into one student on this machine, in minutes.

    Trains a tiny base model by SFT, a GRPO specialist for each of three domains, then one student by
    on-policy distillation from all three, and prints a table of scores. Needs no GPU and no network.
    """
    say_loading()
    from practicum.commands.demo import run_demo

    run_demo(out, seed)


@app.command(name="eval", no_args_is_help=True)
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH", help="Folder, hub name, run or checkpoint to evaluate."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the scores as JSON, and all other output to stderr.")
    ] = False,
    answers: Annotated[
        Path | None, typer.Option("--answers", metavar="FILE", help="Write the responses to a JSONL file.")
    ] = None,
) -> None:
    """Evaluate a model on the held-out prompts of a recipe.

    practicum eval recipes/sort/grpo.yaml --model runs/short/export
    """
    from practicum.recipe.load_recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    say_loading()
    from practicum.trainer.evaluate import evaluate_recipe

    with _stdout_to_stderr() if as_json else nullcontext():
        scores = evaluate_recipe(loaded, model, quiet=as_json, answers=answers)
    if as_json:
        named = {"recipe": loaded.recipe.name, "model": model or loaded.recipe.model.path}
        typer.echo(json.dumps({**named, "scores": scores}, indent=2))


@app.command(no_args_is_help=True)
def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Prompts, in quotes.")],
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="NAME", help="Task whose settings apply. Default: the first."),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Use the most likely tokens instead of sampling.")
    ] = False,
) -> None:
    """Show the responses of a run's model to prompts of your own.

    practicum sample runs/short 'sort:4213='
    """
    say_loading()
    from practicum import api

    for prompt, response in zip(prompts, api.sample(run, prompts, task=task, greedy=greedy), strict=True):
        typer.echo(response if len(prompts) == 1 else f"{prompt} → {response}")


@app.command(no_args_is_help=True)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a checkpoint of one.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Step of the checkpoint. Default: the newest.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the checkpoint with the best evaluation.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="New folder. Default: RUN/exports/step-N.")
    ] = None,
) -> None:
    """Write a checkpoint's model in HuggingFace format.

    The folder includes the tokenizer. Needs no GPU.

    practicum export runs/short --to models/short
    """
    if best and step is not None:
        raise typer.BadParameter("use either --step or --best")
    say_loading()
    from practicum.trainer.run_models import export_run

    checkpoint, folder = export_run(run, step, best, to)
    typer.echo(f"{checkpoint.name} → {folder}")


@app.command(no_args_is_help=True)
def merge(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs, checkpoints, models or adapters of one base.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="New folder.")],
    weights: Annotated[
        list[float] | None,
        typer.Option("--weight", metavar="W", help="Weight of a RUN's change, once per RUN. Default: 1 / N."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="PATH", help="Base model. Default: the one that the runs name."),
    ] = None,
) -> None:
    """Merge models of one base: base + Σ weight × (model − base).

    Adapters become one adapter of the summed rank, written beside the merged model. Needs no GPU.

    practicum merge runs/short models/short --base runs/short --to models/sum
    """
    say_loading()
    from practicum.trainer.run_models import merge_runs

    typer.echo(f"{len(runs)} models of {merge_runs(runs, to, weights, base)} → {to}")


@app.command(no_args_is_help=True)
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub name, run or checkpoint.")],
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=PATH",
            help="A LoRA adapter of MODEL, served under NAME. May be repeated.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port, or 0 for any free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="PRACTICUM_API_KEY",
            help="API key that requests must send. Prefer the variable.",
        ),
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="With --host: serve other machines without a key.")
    ] = False,
    max_body_mb: Annotated[
        float | None,
        typer.Option(
            "--max-body-mb", min=0.001, help="Maximum MiB of a request. Default: enough for the context."
        ),
    ] = None,
    connections: Annotated[
        int, typer.Option("--connections", min=1, help="Maximum concurrent connections.")
    ] = 256,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model on the server. Default: MODEL.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=2, help="Maximum tokens of a sequence. Default: the model's."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="float32, bfloat16 or float64. Default: float32 on a CPU, else bfloat16."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads. Default: all cores.")
    ] = None,
) -> None:
    """Serve a model as a teacher, for recipes with `url`.

    Scores prompts through /v1/completions in vLLM's format with the torch engine (docs/vllm.md shows the
    command for vLLM). Serving other machines needs --host and a key. Ctrl-C stops the server.

    practicum serve runs/short/export --port 8000
    """
    if dtype not in (None, "float32", "bfloat16", "float64"):
        raise typer.BadParameter(f"--dtype is {dtype}, expected float32, bfloat16 or float64")
    say_loading(model)
    from practicum.serving.serve import ServeOptions
    from practicum.serving.serve import serve as run
    from practicum.trainer.run_models import adapter_path, model_folder

    folder = model_folder(model)
    named = []
    for adapter in adapters or ():
        as_name, _, path = adapter.partition("=")
        if not as_name or not path:
            raise typer.BadParameter(f"--adapter is {adapter}, expected NAME=PATH, such as sort=runs/sort")
        named.append((as_name, adapter_path(path, "--adapter")))
    name = name or (model if folder != model else None)
    options: Any = {"model": folder, "host": host, "port": port, "name": name, "api_key": api_key}
    options |= {"context": context, "dtype": dtype, "threads": threads, "adapters": tuple(named)}
    options |= {"no_key": no_key, "max_body_mb": max_body_mb, "connections": connections}
    run(ServeOptions(**options), typer.echo)


@contextmanager
def _viewed(folders: list[Path]) -> Iterator[None]:
    """Serve the page about these runs while they train."""
    from practicum.observe.view.serve_view import view_beside

    with view_beside(folders) as address:
        typer.echo(f"view: {address}")
        yield
    typer.echo(f"the page has closed with the run: practicum view {folders[-1]} reopens it")


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, including the output of users' functions and other processes."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
