"""Tables of the docs, written from the code they describe."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

import practicum as pr
from practicum import parts
from practicum.checks.learning import RULES
from practicum.cli import app
from practicum.dataplane.columns import padding_batch
from practicum.dataplane.fields import FIELDS, Field
from practicum.dataplane.ragged import Ragged
from practicum.dataplane.stages import StageSpec
from practicum.engines.protocol import Engine
from practicum.observe.metrics import METRICS
from practicum.observe.records.record_files import TRACED
from practicum.recipe.derived import Traits
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text.show_recipe import markdown
from practicum.rewards.reward_functions import RewardSample
from practicum.roles.stage_table import all_stages
from practicum.sessions import session
from practicum.tasks.builtin import describe_tasks
from tests.hosts.tables import (
    bytes_table,
    control_plane_table,
    cuts_table,
    roles_table,
    step_seconds_table,
    weights_table,
    workers_table,
)

from .pages import PAGES, ROOT, blocks_of

_LETTERS = {"prompt": "P", "response": "R", "sequence": "P+R"}
_SHOWN, _HELP_WIDTH = 32, 100


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    body = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", *body])


def fields_table() -> str:
    """Every field of a row."""
    rows = ((f"`{f.name}`", f.dtype, _shape(f), f.writer, f.clock, f.about) for f in FIELDS.values())
    return table(("field", "dtype", "shape", "written by", "clock", "what"), rows)


def _shape(field: Field) -> str:
    if field.extent == "object":
        return "any"
    axes = [_LETTERS[field.extent]] if field.extent != "scalar" else []
    return f"[{', '.join([*axes, *map(str, field.trailing)])}]"


def padding_rules_table() -> str:
    """What a padding row holds in each field, by rule."""
    widths = {str(axis): 2 for field in FIELDS.values() for axis in field.trailing}
    _, columns = padding_batch("train", 1, list(FIELDS), end_id=0, widths=widths)
    rules: dict[str, list[str]] = {}
    for name, column in columns.items():
        field = FIELDS[name]
        axes = [str(len(column[0]))] if isinstance(column, Ragged) else []
        shape = f" [{', '.join([*axes, *map(str, field.trailing)])}]" if field.extent != "object" else ""
        rules.setdefault(f"`{field.padding}`", []).append(f"`{name}`{shape}")
    return table(("rule", "fields of a padding row"), ((rule, ", ".join(f)) for rule, f in rules.items()))


def metrics_table() -> str:
    """Every name that may stand in metrics.jsonl."""
    return table(("name", "what"), ((f"`{name}`", about) for name, about in METRICS.items()))


def tasks_table() -> str:
    """The built-in tasks, as `practicum tasks` lists them."""
    rows = []
    for task in describe_tasks():
        answer = task.answer if len(task.answer) <= _SHOWN else f"{task.answer[:_SHOWN]}…"
        options = "; ".join(f"`{name}` = {about}" for name, about in task.options.items())
        rows.append((f"`{task.name}`", task.about, f"`{task.prompt}` → `{answer}`", options))
    return table(("kind", "what", "example", "options and their defaults"), rows)


def sample_fields() -> list[str]:
    """What a reward function is given."""
    return [field.name for field in dataclasses.fields(RewardSample)]


def engine_table() -> str:
    """The methods that every engine has, with the first paragraph of what each says."""
    methods = [
        (name, method)
        for kind in reversed(inspect.getmro(Engine))  # what it inherits from Scorer first
        for name, method in vars(kind).items()
        if kind.__module__ == "practicum.engines.protocol" and inspect.isfunction(method)
    ]
    rows = []
    for name, method in methods:
        if name.startswith("_"):
            continue
        parameters = ", ".join(list(inspect.signature(method).parameters)[1:])
        called = f"await {name}" if inspect.iscoroutinefunction(method) else name
        about = (inspect.getdoc(method) or "").split("\n\n")[0].replace("\n", " ")
        rows.append((f"`{called}({parameters})`", about))
    return table(("method", "what it does"), rows)


_VARIANTS: tuple[dict[str, Any], ...] = (
    {"teachers": {"t": {"model": "t"}}, "distill": {"signal": "top_k"}},
    {"teachers": {"t": {"model": "t"}}, "distill": {"signal": "full"}},
    {
        "algorithm": {"advantage": "gae", "kl": {"place": "reward"}, "mismatch": "token"},
        "critic": {},
        "train": {"epochs": 2, "minibatches": 2},
    },
    {"algorithm": {"kl": {"place": "loss"}}, "train": {"minibatches": 2}},
    {
        "teachers": {"t": {"model": "t"}},
        "distill": {"divergence": "k1", "signal": "sampled", "apply_as": "advantage"},
        "algorithm": {"old_logprobs": "rollout"},
        "train": {"minibatches": 2},
    },
    {"algorithm": {"loss": "supervised", "advantage": "none"}},
)
"""Recipes that together read and write all that a stage may."""
_RANKS = {
    "all": "all learner ranks",
    "first": "the first learner rank",
    "controller": "the controller",
}
_ELSEWHERE = {
    "demonstrate": "rollout replicas",
    "rollout": "rollout replicas",
    "reward": "reward workers, processes and clients of reward models",
    "teachers": "learner ranks (colocated), their own processes, clients of URLs",
    "sync": "all learner ranks, then all rollout replicas",
}
"""Stages that others than the learner's ranks and the controller work for."""


def stages_table() -> str:
    """Every stage of a step: its file, what it may read and write, and where it runs on Ray."""
    specs: dict[str, StageSpec] = {}
    for recipe in _variants():
        for spec in all_stages(recipe, Traits(vision=True, moe=True)):
            known = specs.get(spec.name, spec)
            reads, writes = (*known.reads, *spec.reads), (*known.writes, *spec.writes)
            specs[spec.name] = dataclasses.replace(spec, reads=reads, writes=writes)
    rows = (
        (
            f"`{spec.name}`",
            f"`{_role_file(spec)}`",
            _in_order({*spec.reads}),
            _in_order({*spec.writes}),
            _ELSEWHERE.get(spec.name, _RANKS[spec.ranks]),
        )
        for spec in specs.values()
        if not spec.use
    )
    return table(("stage", "file", "may read", "may write", "on Ray, runs in"), rows)


def _variants() -> list[Recipe]:
    plain = {"name": "any", "model": {"random_init": {}}, "tasks": {"sort": {"kind": "sort"}}}
    return [Recipe.model_validate({**plain, **variant}) for variant in _VARIANTS]


def _in_order(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in FIELDS if name in names) or "–"


def _role_file(spec: StageSpec) -> str:
    """The file of the role that the stage table names."""
    files = [f"roles/{spec.role}.py", f"trainer/{spec.role}.py"]
    return next(file for file in files if (ROOT / "src/practicum" / file).is_file())


def recipe_keys() -> str:
    """Return every key of a recipe, as `practicum schema` prints them."""
    return markdown().removeprefix("# The recipe\n").strip()


def command_help() -> str:
    """Return the help of every command."""
    commands = getattr(get_command(app), "commands")  # noqa: B009
    return "\n\n".join(_help_of(name, command) for name, command in commands.items())


def _help_of(name: str, command: Any) -> str:
    context = command.make_context(f"practicum {name}", [], resilient_parsing=True)
    context.terminal_width = context.max_content_width = _HELP_WIDTH
    return f"## {name}\n```text\n{command.get_help(context).strip()}\n```"


def python_functions() -> str:
    """Return signature, docstring and members of each function and class of `import practicum as pr`."""
    return "\n\n".join(_documented("pr.", pr, name) for name in pr.__all__ if not name.startswith("_"))


def own_part_functions() -> str:
    """Return the same of what custom parts, loops and reward functions are given and may use."""
    return "\n\n".join(
        [_documented("", session, "Session"), *(_documented("", parts, n) for n in parts.__all__)]
    )


def _documented(prefix: str, module: ModuleType, name: str) -> str:
    thing = getattr(module, name)
    about = (inspect.getdoc(thing) or "").strip()
    if not inspect.isclass(thing):
        shown = f"```text\n{name}{_signature(thing)}\n```\n" if callable(thing) else ""
        return f"### `{prefix}{name}`\n{shown}{about}".rstrip()
    about = "" if about.startswith(f"{name}(") else about
    members = [(f"`{member}`", text) for member, text in _members(thing)]
    plain = ", ".join(member for member, text in members if not text)
    rows = [(member, text) for member, text in members if text]
    shown = [f"### `{prefix}{name}`\n{about}", f"Members: {plain}" if plain else ""]
    return "\n\n".join(filter(None, [*shown, table(("member", "what"), rows) if rows else ""]))


def _signature(thing: Callable[..., Any]) -> str:
    return str(inspect.signature(thing)).replace("'", "")


def _members(cls: type) -> Iterable[tuple[str, str]]:
    """Yield fields, properties and methods that the class itself defines, each with its description."""
    if issubclass(cls, BaseModel) or cls.__module__ == "typing":
        return
    notes = _notes(cls)
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    for member in (field for field in fields if not field.name.startswith("_")):
        yield f"{member.name}: {member.type}", notes.get(member.name, "")
    for name, member in vars(cls).items():
        about = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
        if isinstance(member, property) and not name.startswith("_"):
            yield name, about.removeprefix("Return ")
        elif inspect.isfunction(member) and not name.startswith("_"):
            yield f"{name}{_signature(member)}".replace("(self, ", "(").replace("(self)", "()"), about


def _notes(cls: type) -> dict[str, str]:
    """Return the docstrings that stand below the fields of a class."""
    (body,) = (
        node.body
        for node in ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        if isinstance(node, ast.ClassDef)
    )
    notes = {}
    for node, after in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
        ):
            notes[node.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return notes


def advisories_table() -> str:
    """The rules that judge whether a run is learning."""
    named = [(rule.__name__.replace("_", " "), inspect.getdoc(rule) or "") for rule in RULES]
    return table(("rule", "finds"), [(name, about.removeprefix("Report ")) for name, about in named])


def traced_table() -> str:
    """What a record has of the update, token by token."""
    return table(("column", "what"), [(f"`{name}`", about) for name, about in TRACED.items()])


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "stages": ("architecture.md", stages_table),
    "engine protocol": ("rollout.md", engine_table),
    "fields": ("dataplane.md", fields_table),
    "padding rules": ("padding.md", padding_rules_table),
    "metrics": ("metrics.md", metrics_table),
    "keys": ("keys.md", recipe_keys),
    "commands": ("commands.md", command_help),
    "functions": ("api.md", python_functions),
    "own parts": ("api.md", own_part_functions),
    "traced": ("runs.md", traced_table),
    "tasks": ("tasks.md", tasks_table),
    "advisories": ("view.md", advisories_table),
    "bytes": ("cluster.md", bytes_table),
    "bytes of hosts": ("cluster.md", roles_table),
    "bytes of workers": ("cluster.md", workers_table),
    "step seconds": ("cluster.md", step_seconds_table),
    "weights": ("cluster.md", weights_table),
    "control plane": ("cluster.md", control_plane_table),
    "cuts": ("reliability.md", cuts_table),
}
"""Each table's page and maker; there it stands between the comments <!-- table: name --> and <!-- end -->."""


def update_page(text: str, name: str) -> str:
    """The page with this table written anew."""
    begin = f"<!-- table: {name} -->\n"
    before, _, rest = text.partition(begin)
    _, closed, after = rest.partition("\n<!-- end -->")
    assert closed, f"the page has no comments around the table {name!r}"
    return before + begin + TABLES[name][1]() + closed + after


def update_blocks(page: Path) -> str:
    """The page with the files that its titled blocks show written anew."""
    text = page.read_text()
    for block in blocks_of(page):
        if block.title:
            file = (ROOT / block.title).read_text()
            text = text.replace(f"{block.info}\n{block.text}```", f"{block.info}\n{file}```")
    return text


if __name__ == "__main__":  # writes tables and files into docs/, from the root of the repository
    for name, (page, _) in TABLES.items():
        path = Path("docs") / page
        path.write_text(update_page(path.read_text(), name))
    for path in PAGES:
        path.write_text(update_blocks(path))
