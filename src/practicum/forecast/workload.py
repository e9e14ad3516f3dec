"""How much work a step is: rows and tokens, by the recipe and by what a finished run measured; and the bytes
that it moves: through the controller, through the data plane, and as weights."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from pydantic import ValidationError

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS, field_bytes
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.stages import Plan
from practicum.errors import PracticumError, RecipeErrors
from practicum.forecast.model_sizes import Models, trained_bytes
from practicum.recipe.counts import count
from practicum.recipe.derived import is_supervised
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.problems import explain

WARM_UP = 2
"""First steps of a run that are left out: caches are cold, shapes are new."""
ANSWER_SHARE = 0.5
"""Mean length of an answer as a fraction of rollout.max_new_tokens, where nothing was measured."""
SAMPLED_PROMPTS = 256
ALL_RANKS = ("update_student", "update_critic")
"""Stages in which each rank gets the metadata of the whole batch, not only of its rows."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Medians over the steps of a run. `seconds` has its stages, and `step` for the whole step.

    `idle` is the fraction of trained tokens that needed no backward pass: their advantages were all 0.
    """

    recipe: Recipe
    seconds: Mapping[str, float]
    response_tokens: float | None
    truncated: float
    idle: float
    steps: int


def read_run(folder: Path) -> MeasuredRun:
    """The run in a folder; a PracticumError if there is none, or if it has too few steps."""
    try:
        written = yamlfile.parse((folder / "recipe.yaml").read_text(), str(folder / "recipe.yaml")).data
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        raise PracticumError(
            f"--from {folder}: {error.strerror}: {error.filename}; expected the folder of a finished run"
        ) from None
    try:
        recipe = Recipe.model_validate(written)
    except ValidationError as error:
        raise RecipeErrors(str(folder / "recipe.yaml"), explain(error, {})) from None
    return summarise(recipe, rows, str(folder))


def summarise(recipe: Recipe, rows: Sequence[Mapping[str, float]], source: str = "the run") -> MeasuredRun:
    """A run by its recipe and its metrics, one mapping for each step."""
    steps = [row for row in rows if "time/step" in row]
    used = steps[WARM_UP:]
    if not used:
        raise PracticumError(
            f"{source} has {len(steps)} steps: a forecast needs more than {WARM_UP}, the first are left out"
        )

    def middle(name: str) -> float:
        return float(median(row.get(name, 0.0) for row in used))

    timed = {name for row in used for name in row if name.startswith("time/") and name != "time/eval"}
    samples = any("rollout/response_tokens" in row for row in used)
    return MeasuredRun(
        recipe,
        {name.removeprefix("time/"): middle(name) for name in timed},
        middle("rollout/response_tokens") if samples else None,
        middle("rollout/truncated"),
        middle("train/idle_tokens"),
        len(used),
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """A step's prompts, its sessions (one row each), and mean tokens of a prompt and an answer.

    `greedy` sessions are rolled out and scored, but not trained on. `longest` is where the last answers end.
    `idle`: see `MeasuredRun`. `source` says where the lengths come from.
    """

    prompts: int
    sessions: int
    greedy: int
    prompt_tokens: float
    response_tokens: float
    longest: float
    idle: float
    source: str

    @property
    def rows(self) -> int:
        return self.sessions + self.greedy

    @property
    def sampled(self) -> float:
        """Tokens that the engines sample."""
        return self.rows * self.response_tokens

    @property
    def trained(self) -> float:
        """Tokens of one pass of the learner: a prompt is computed once for all of its answers."""
        return self.prompts * self.prompt_tokens + self.sessions * self.response_tokens

    @property
    def scored(self) -> float:
        """Tokens of rows, each with its prompt."""
        return self.sessions * (self.prompt_tokens + self.response_tokens)

    @property
    def attended(self) -> float:
        """Mean number of tokens that a token attends to."""
        return self.prompt_tokens + self.response_tokens / 2

    def decode_steps(self, replicas: int, slots: int) -> float:
        """Forward calls of one engine: all sessions at once, or in waves if they outnumber its slots."""
        return self.longest + max(0.0, self.rows / replicas / slots - 1) * self.response_tokens


def workload(recipe: Recipe, prompt_tokens: float, run: MeasuredRun | None) -> Workload:
    """The work of a recipe's step; answers are as long as in the run, else by `ANSWER_SHARE`."""
    counts, most = count(recipe), recipe.rollout.max_new_tokens
    if run is None or run.response_tokens is None:
        mean, longest, idle = ANSWER_SHARE * most, float(most), 0.0
        better = "" if is_supervised(recipe) else ": --from RUN knows better"
        source = f"half of rollout.max_new_tokens = {most}, a guess{better}"
    else:
        mean, idle = run.response_tokens, 0.0 if is_supervised(recipe) else run.idle
        longest = float(most) if run.truncated else min(float(most), 2 * mean)
        source = f"as in the run, {run.steps} steps of it"
    return Workload(
        counts.prompts, counts.sessions, counts.baselines, prompt_tokens, mean, longest, idle, source
    )


def mean_prompt_tokens(recipe: Recipe) -> float:
    """Mean tokens of the training stream's first prompts. Imports torch, as no other part of a forecast."""
    from practicum.models.load_model import load_tokenizer
    from practicum.sessions.chat import make_encoder
    from practicum.tasks.check_tasks import tasks_needing_answer
    from practicum.tasks.stream import make_stream

    encode = make_encoder(recipe, load_tokenizer(recipe.model))
    stream = make_stream(recipe.tasks, recipe.seed, needs_answer=tasks_needing_answer(recipe))
    return fmean(len(encode(prompt).ids) for prompt in stream.take(SAMPLED_PROMPTS))


class StageBytes(NamedTuple):
    """Bytes that a stage reads from the data plane and writes to it."""

    read: float
    written: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """`controller` is keys and tags; `sync` is one version of the weights for each engine.

    `uncounted` are fields whose size can't be known beforehand.
    """

    controller: float
    plane: Mapping[str, StageBytes]
    sync: float
    uncounted: tuple[str, ...] = ()

    @property
    def plane_bytes(self) -> float:
        return sum(map(sum, self.plane.values()))


def traffic(recipe: Recipe, plan: Plan, models: Models, work: Workload, ranks: int, replicas: int) -> Traffic:
    """What a step of this plan moves."""
    student = models.student
    widths = {"D": 3, "E": student.experts_per_token, "L": student.layers, "H": models.teacher_width}
    widths["K"] = recipe.distill.top_k if recipe.distill is not None else 0
    prompt, response = work.prompt_tokens, work.response_tokens
    tokens = {"scalar": 1.0, "prompt": prompt, "response": response, "sequence": prompt + response}
    plane, controller = {}, 0.0
    for stage in plan:
        if not (stage.reads or stage.writes):
            continue
        rows = work.rows if stage.name in ("rollout", "reward") else work.sessions
        read, written = (rows * field_bytes(names, tokens, widths) for names in (stage.reads, stage.writes))
        plane[stage.name] = StageBytes(read, written)
        # Sent as the stage's argument, and returned with new tags where rows are made or scored.
        returns = stage.name in ("rollout", "demonstrate", "reward")
        copies = 2 if returns else ranks if stage.name in ALL_RANKS else 1
        controller += copies * rows * metadata_bytes()
    sync = float(trained_bytes(recipe, student) * replicas)
    objects = [name for stage in plan for name in stage.writes if FIELDS[name].extent == "object"]
    return Traffic(controller, plane, sync, tuple(dict.fromkeys(objects)))


@lru_cache(1)
def metadata_bytes(rows: int = 256) -> float:
    """Bytes of one row's key and tags on the way to another process."""
    keys = tuple(Key(1000 + i // 8, i % 8) for i in range(rows))
    tags = tuple(
        Tags(prompt_tokens=300 + i, response_tokens=500 + i, sampled_tokens=500 + i, reward=i / 7)
        for i in range(rows)
    )
    return len(pickle.dumps(BatchRef("train", keys, tags), protocol=5)) / rows
