"""Commands about recipes: recipes, init, check, explain, plan, schema and tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from practicum.commands.command_app import Overrides, RecipePath, app, say_loading
from practicum.errors import ClusterError


@app.command()
def recipes() -> None:
    """List the recipes that come with practicum.

    Each with its subject and expected score. `practicum init NAME` copies one.
    """
    from practicum.recipe.shipped import list_recipes

    for folder, group in list_recipes().items():
        typer.echo(f"{folder}")
        for recipe in group:
            typer.echo(f"  {recipe.name}: {recipe.about}")
            if recipe.expected is not None:
                typer.echo(f"    expected: {recipe.expected}")
    typer.echo("\npracticum init NAME [DIR] copies a folder of recipes or one recipe")


@app.command(no_args_is_help=True)
def init(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A folder, such as sort, or a recipe, sort/ppo.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Target folder. Default: ./NAME.")
    ] = None,
) -> None:
    """Copy recipes that come with practicum, for you to edit.

    Copies their data, functions and README too. Existing files are not overwritten.

    practicum init sort mine
    """
    from practicum.recipe.shipped import copy_recipe

    for sentence in copy_recipe(name, folder):
        typer.echo(sentence)


@app.command(no_args_is_help=True)
def check(
    files: Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files.")],
    overrides: Overrides = None,
    static: Annotated[
        bool, typer.Option("--static", help="Check only the recipe, without loading files or models.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show all values with their origins, and the stages.")
    ] = False,
) -> None:
    """Check a recipe, and summarise it on one screen.

    Shows sizes and warnings, then changes from the defaults and findings about files and models. `check`
    refuses whatever `train` would refuse.

    practicum check recipes/sort/start.yaml --set rollout.max_num_seqs=64
    """
    from practicum import api

    all_loaded = [api.load_recipe(file, overrides or []) for file in files]
    if not static:
        say_loading()
    more = "" if everything else "; --all shows all values with their origins"
    for loaded in all_loaded:
        typer.echo(api.check(loaded, static=static).text(everything=everything))
        typer.echo(f"\nok{' (static part only)' if static else ''}{more}")


@app.command(no_args_is_help=True)
def explain(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Draw the stages of a step.

    Shows what each stage reads and writes, and why stages are skipped.

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
        typer.Option(
            "--cluster", metavar="FILE", help="Machines of a cluster (YAML). Default: this machine."
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Forecast the memory of a step, and the placement of the roles.

    A recipe that does not fit is an error. With --cluster, roles are Ray actors.

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
    # A teacher that is not on this machine yet is counted like the student.
    teachers = {
        name: teacher
        for name, teacher in loaded.recipe.teachers.items()
        if teacher.model is None or Path(teacher.model).expanduser().is_dir()
    }
    require_layers(loaded.recipe.model_copy(update={"teachers": teachers}))
    for name, teacher in teachers.items():
        if teacher.engine_traits.runs_transformers and teacher.model is not None:
            require_known_layers(teacher.model, f"teachers.{name}.model")
    predicted = forecast(loaded.recipe, spec, mean_prompt_tokens(loaded.recipe))
    typer.echo(report(predicted))
    if predicted.refusals:
        raise ClusterError("\n".join(["", *predicted.refusals]))


@app.command()
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="JSON schema, for editors.")] = False,
) -> None:
    """Print all recipe keys.

    The Markdown tables have the type, default and description of each.

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
