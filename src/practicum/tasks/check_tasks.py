"""What can be known of tasks and rewards before any work; `practicum check` runs it. No torch."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from practicum.errors import DataError, RecipeError, RecipeErrors
from practicum.recipe.checks.combinations import check_source
from practicum.recipe.schema.recipe import Recipe, RewardFunction, Task
from practicum.tasks.builtin import TASKS, bind, find_kind, find_problems
from practicum.tasks.files import READERS, expand
from practicum.tasks.locations import eval_location, open_rows, train_location
from practicum.tasks.messages import image_parts
from practicum.tasks.pictures import open_picture
from practicum.tasks.rewards import RewardFunctions
from practicum.tasks.rows import RowSource
from practicum.tasks.scorers import NEEDS_ANSWER, SCORERS, RewardSample, find_entry
from practicum.tasks.stream import eval_prompts

_TRIED_ROWS = 16
_SEEN_ROWS = 256


def check_tasks(recipe: Recipe) -> list[str]:
    """What was found, in sentences. Mistakes are one RecipeErrors, then bad rows a DataError."""
    problems = [p for name, task in recipe.tasks.items() for p in _find_problems(name, task)]
    problems += _reward_problems(recipe)
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    findings, faults = [], []
    for name, task in recipe.tasks.items():
        try:
            findings += _check_builtin(recipe, name) if task.kind else _check_rows(recipe, name)
        except RecipeError as problem:
            problems.append(problem)
        except DataError as fault:
            faults.append(str(fault))
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    if faults:
        raise DataError("\n".join(faults))
    return findings


def tasks_needing_answer(recipe: Recipe) -> set[str]:
    """Tasks whose rows must have an answer: for a reward or a loop that compares, or as a demonstration."""
    needed = recipe.algorithm.loss == "supervised" or recipe.agent.loop == "retry"
    return {
        name
        for name in recipe.tasks
        if needed or any(f.use in NEEDS_ANSWER for f in _functions(recipe, name))
    }


def _functions(recipe: Recipe, name: str) -> list[RewardFunction]:
    own = recipe.tasks[name].rewards
    return recipe.reward.functions if own is None else own


def _find_problems(name: str, task: Task) -> list[RecipeError]:
    at = f"tasks.{name}"
    if problems := list(check_source(name, task)):
        return problems
    if task.kind is not None:
        problems += find_problems(name, task.kind, task.options)
        if task.eval_file is not None:
            hint = "leave it out: a built-in task holds out its own evaluation prompts."
            problems.append(RecipeError(f"{at}.eval_file", repr(task.eval_file), "none", hint))
        shows = not problems and find_kind(task.kind, name).pictures
        if task.system is not None and not task.chat and not shows:
            problems.append(_useless_system(at))
        return problems
    if task.options:
        hint = "options belong to built-in tasks."
        problems.append(RecipeError(f"{at}.options", str(task.options), "none with rows", hint))
    if task.dataset is None:
        for key, location in (("file", train_location(task)), ("eval_file", eval_location(task))):
            for path in expand(location.files) if location else ():
                problems += _path_problems(f"{at}.{key}", path)
    return problems


def _useless_system(at: str) -> RecipeError:
    hint = f"set {at}.chat: true, or leave the system message out."
    return RecipeError(f"{at}.system", "a system message", "chat prompts to put it before", hint)


def _path_problems(at: str, path: Path) -> list[RecipeError]:
    if path.is_dir():
        key = at.rpartition(".")[0]
        hint = f"name the files in it, such as {path / '*.jsonl'}; {key}.dataset takes a dataset's folder"
        return [RecipeError(at, f"the folder {str(path)!r}", "a file", hint)]
    if not path.is_file():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, names, n=1)
        hint = (
            f"did you mean {path.parent / near[0]}?"
            if near
            else f"it is neither beside the recipe nor in {Path.cwd()}."
        )
        return [RecipeError(at, repr(str(path)), "a file that exists", hint)]
    if path.suffix not in READERS:
        return [RecipeError(at, repr(str(path)), f"a file ending in {' or '.join(READERS)}")]
    return []


def _reward_problems(recipe: Recipe) -> list[RecipeError]:
    try:
        RewardFunctions(recipe.tasks, recipe.reward)
    except RecipeErrors as several:
        return several.errors
    except RecipeError as problem:
        return [problem]
    return [
        RecipeError(
            f"tasks.{name}",
            f"reward reasoning_gym for the built-in task {task.kind}",
            "a file of reasoning-gym entries",
            f"give the task rewards of its own: tasks.{name}.rewards.",
        )
        for name, task in recipe.tasks.items()
        if task.kind is not None and _uses_reasoning_gym(recipe, name)
    ]


def _uses_reasoning_gym(recipe: Recipe, name: str) -> bool:
    return any(f.use == "reasoning_gym" for f in _functions(recipe, name))


def _check_builtin(recipe: Recipe, name: str) -> list[str]:
    task = recipe.tasks[name]
    assert task.kind is not None
    example = bind(name, task.kind, task.options).example(recipe.seed, "train", 0)
    for picture in example.pictures:
        picture.draw()
    held_out = eval_prompts({name: task}, recipe.eval.rows, recipe.seed)
    built_in = "built-in " if task.kind in TASKS else ""
    findings = [f"tasks.{name}: {built_in}{task.kind}, {len(held_out)} evaluation prompts held out"]
    if len(held_out) < recipe.eval.rows:
        findings.append(
            f"tasks.{name}: its options leave only {len(held_out)} distinct evaluation prompts "
            f"of the {recipe.eval.rows} asked for"
        )
    return findings


def _check_rows(recipe: Recipe, name: str) -> list[str]:
    task = recipe.tasks[name]
    needs_answer = name in tasks_needing_answer(recipe)
    findings, sources = [], []
    for at in (train_location(task), eval_location(task)):
        if at is not None:
            source = open_rows(name, task, at, needs_answer)
            sources.append(source)
            findings.append(f"tasks.{name}: {at} {_describe_size(source, at.streaming)}")
            if source.has_pictures:
                findings.append(_check_pictures(name, source))
            if _uses_reasoning_gym(recipe, name):
                findings += _check_entries(name, source)
    chats = task.chat or any(source.has_messages or source.has_pictures for source in sources)
    if task.system is not None and not chats:
        raise _useless_system(f"tasks.{name}")
    if eval_location(task) is None:
        key = "eval_file" if task.dataset is None else "eval_split"
        findings.append(f"tasks.{name}: no {key}, so it is trained on and not evaluated")
    return findings


def _describe_size(source: RowSource, streaming: bool) -> str:
    if not streaming:
        return f"has {len(source)} rows"
    return f"is streamed: its first {len(source):,} rows are good, later ones are checked as they come"


def _check_pictures(name: str, source: RowSource) -> str:
    """Opens the pictures of the first rows; those of the others when their prompts come up."""
    pictures = 0
    for index in range(min(_SEEN_ROWS, len(source))):
        for part in image_parts(source.content(index, source.row(index))):
            try:
                open_picture(part["image"])
            except DataError as fault:
                raise DataError(f"{source.where(index)}: {fault}") from None
            pictures += 1
    return f"tasks.{name}: {pictures} pictures of the first {min(_SEEN_ROWS, len(source))} rows can be read"


def _check_entries(name: str, source: RowSource) -> list[str]:
    """Every row holds an entry; a few are scored, for JSON loses what some datasets compare."""
    score = SCORERS["reasoning_gym"]()
    unsure = 0
    for index in range(len(source)):
        try:
            _, entry = find_entry(source.row(index))
        except DataError as fault:
            raise DataError(f"{source.where(index)}: {fault}") from None
        if index < _TRIED_ROWS:
            answer = str(entry["answer"])
            sample = RewardSample("", answer, answer, source.row(index), name, name, "stop", "", 0)
            try:
                unsure += score(sample) < 1.0
            except Exception as error:
                raise DataError(f"{source.where(index)}: reasoning_gym can't score it: {error}") from error
    if not unsure:
        return []
    tried = min(_TRIED_ROWS, len(source))
    return [f"tasks.{name}: reasoning_gym gives {unsure} of {tried} rows' own answers less than 1"]
