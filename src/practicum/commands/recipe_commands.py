"""Commands about recipes: what there is, what one means, whether it can run, what it will take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from practicum.commands.command_app import Overrides, RecipePath, app, say_loading
from practicum.errors import ClusterError


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
            if recipe.expected is not None:
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

    First what will run and what to worry about, then what differs from the defaults and what was found in
    files and model. What `train` would refuse is refused here.

    practicum check recipes/sort/start.yaml --set rollout.max_num_seqs=64
    """
    from practicum import api

    all_loaded = [api.load_recipe(file, overrides or []) for file in files]
    if not static:
        say_loading()
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
    overrides: Overrides = None,
) -> None:
    """Forecast the memory of a step on a cluster, and who sits where.

    What does not fit is an error. With --cluster the roles are Ray actors.

    practicum plan recipes/sort/start.yaml --cluster examples/cluster.yaml
    """
    from practicum.forecast.forecast import forecast, load_spec, mean_prompt_tokens, report, this_machine
    from practicum.models.load_model import require_known_layers
    from practicum.recipe.load_recipe import load_recipe
    from practicum.trainer.preflight import require_layers
    from practicum.trainer.run_models import resolve_models

    on_ray = [] if cluster is None else ["runtime.kind=ray"]
    loaded, _ = resolve_models(load_recipe(recipe, [*(overrides or []), *on_ray]), weights=False)
    spec = this_machine() if cluster is None else load_spec(cluster)
    # A teacher that is not here yet is counted like the student: its layers are not known.
    teachers = {
        name: teacher
        for name, teacher in loaded.recipe.teachers.items()
        if teacher.model is None or Path(teacher.model).expanduser().is_dir()
    }
    require_layers(loaded.recipe.model_copy(update={"teachers": teachers}))
    for name, teacher in teachers.items():
        if teacher.engine == "torch" and teacher.model is not None:
            require_known_layers(teacher.model, f"teachers.{name}.model")
    predicted = forecast(loaded.recipe, spec, mean_prompt_tokens(loaded.recipe))
    typer.echo(report(predicted))
    if predicted.refusals:
        raise ClusterError("\n".join(["", *predicted.refusals]))


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
