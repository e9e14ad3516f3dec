"""Stages: what each reads and writes, and the plan of those that a step runs.

Which stages there are, and what a recipe makes of them, is in `roles/stage_table.py`; how one is run is in
`roles/run_stage.py`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from practicum.dataplane.fields import FIELDS, Field, register_field
from practicum.errors import RecipeError, StoreError
from practicum.recipe.counts import Counts

Ranks = Literal["all", "first", "controller"]
"""Who runs a stage: all ranks of the learner together, its first rank alone, or the step itself."""
Side = Literal["sampling", "learning"]
"""Where a stage is in time: before the step, with the weights that sample, or in the step that trains."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage: its reads, writes and ranks. Stages with an effect always run."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    role: str = ""
    """The role whose method is the stage: a file of `roles/`."""
    ranks: Ranks = "all"
    effect: bool = False
    about: str = ""
    skip_reason: str = ""
    """Why this recipe rules the stage out, whatever its effect or readers, or empty if it does not."""
    side: Side = "learning"
    use: str = ""
    """Name of a custom stage in the recipe."""
    metrics: str = ""
    """Prefix of the metrics that it reports; its name by default."""
    completes: bool = False
    """It completes the batch that the stages after it learn from."""
    trains: bool = False
    """It changes weights."""
    first_step: int = 1
    """Number of the first step that runs it."""


@dataclass(frozen=True, slots=True)
class OwnStage:
    """A user's stage `run(rank, batch, columns, step)`. `writes` are new fields, or names of known ones."""

    run: Callable[..., Any]
    name: str
    after: str
    reads: tuple[str, ...]
    writes: tuple[str | Field, ...]
    ranks: Ranks
    about: str

    def spec(self, use: str) -> StageSpec:
        """Register its fields in this process, and return its line of the stage table. `use` is its name."""
        for written in self.writes:
            if isinstance(written, Field):
                try:
                    register_field(written)
                except StoreError as error:
                    raise RecipeError("stages", f"{use!r}, whose {error}", "a field that can be") from None
        names = tuple(written if isinstance(written, str) else written.name for written in self.writes)
        if unknown := [name for name in names if name not in FIELDS]:
            near = get_close_matches(unknown[0], FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "declare a custom field: writes=[Field(…)]"
            raise RecipeError("stages", f"{use!r}, which writes {unknown[0]!r}", "a field that exists", hint)
        return StageSpec(self.name, self.reads, names, "", self.ranks, True, self.about, use=use)


@dataclass(frozen=True)
class Plan:
    """The stages that run, in order, and the skipped ones with reasons."""

    stages: tuple[StageSpec, ...]
    skipped: tuple[tuple[StageSpec, str], ...] = ()
    counts: Counts | None = field(default=None, compare=False)
    lag: int = 0
    """How many steps the sampling side is ahead."""

    def __getitem__(self, name: str) -> StageSpec:
        for stage in self.stages:
            if stage.name == name:
                return stage
        why = next((why for stage, why in self.skipped if stage.name == name), "no such stage")
        raise KeyError(f"stage {name!r} is not in the plan: {why}")

    def __contains__(self, name: object) -> bool:
        return any(stage.name == name for stage in self.stages)

    def __iter__(self) -> Iterator[StageSpec]:
        return iter(self.stages)

    def learner_stages(self) -> list[StageSpec]:
        """Return the stages of the learner's ranks on a complete batch: scored by teachers, and padded."""
        return [stage for stage in self if stage.ranks != "controller" and not stage.completes]

    def writer(self, reader: str, name: str) -> str:
        """Return the stage whose value of field `name` the stage `reader` sees: the last one before it."""
        before = self.stages[: self.stages.index(self[reader])]
        return next(stage.name for stage in reversed(before) if name in stage.writes)


def resolve(candidates: Sequence[StageSpec], why_unread: Mapping[str, str] | None = None) -> Plan:
    """Keep the stages with an effect and those whose writes a later kept stage reads, in order.

    A kept stage that reads what no earlier one writes is a RecipeError. `why_unread` explains for a
    field why this recipe does not read it.
    """
    assert len({stage.name for stage in candidates}) == len(candidates), "stages share a name"
    kept: list[StageSpec] = []
    needed_fields: set[str] = set()
    for stage in reversed(candidates):
        if not stage.skip_reason and (stage.effect or needed_fields & set(stage.writes)):
            kept.append(stage)
            needed_fields = (needed_fields - set(stage.writes)) | set(stage.reads)
    kept.reverse()
    _check_reads(kept, candidates)
    names = {stage.name for stage in kept}
    skipped = tuple(
        (stage, _reason(stage, candidates, why_unread or {}))
        for stage in candidates
        if stage.name not in names
    )
    return Plan(tuple(kept), skipped)


def plan_data(plan: Plan) -> dict[str, Any]:
    stages = [
        {
            "name": stage.name,
            "about": stage.about,
            "role": stage.role,
            "ranks": stage.ranks,
            "side": stage.side,
            "reads": {name: plan.writer(stage.name, name) for name in stage.reads},
            "writes": list(stage.writes),
        }
        for stage in plan.stages
    ]
    skipped = [{"name": stage.name, "about": stage.about, "why": why} for stage, why in plan.skipped]
    return {"stages": stages, "skipped": skipped}


def draw(plan: Plan) -> str:
    """Return the plan as text: stages, what they read from whom and write, and what is skipped."""
    lines = []
    for number, stage in enumerate(plan.stages, start=1):
        if plan.lag and (number == 1 or stage.side != plan.stages[number - 2].side):
            lines += [*([""] if lines else []), _SIDES[stage.side].format(lag=plan.lag)]
        lines.append(f"{number:>2}. {stage.name:<15} {stage.about}".rstrip())
        by_writer: dict[str, list[str]] = {}
        for name in stage.reads:
            by_writer.setdefault(plan.writer(stage.name, name), []).append(name)
        for writer, names in by_writer.items():
            lines.append(f"      ← {', '.join(names)}   (from {writer})")
        if stage.writes:
            clocks = {name: FIELDS[name].clock for name in stage.writes if plan.lag}
            written = [name + f" ({clock})" * (clock != "frozen") for name, clock in clocks.items()]
            lines.append(f"      → {', '.join(written or stage.writes)}")
    if plan.skipped:
        lines += ["", "not run:"]
        lines += [f"  – {stage.name:<15} {why}" for stage, why in plan.skipped]
    if plan.counts is not None:
        lines += ["", "counts:", *(f"  {line}" for line in plan.counts.lines())]
    return "\n".join(lines)


_SIDES = {
    "sampling": "sampled ahead, by weights that are {lag} steps older than those that the step trains:",
    "learning": "in the step that trains:",
}


def check_sides(plan: Plan) -> None:
    """With a lag, a stage on the sampling side that reads or writes a learner's field is a RecipeError."""
    learning = False
    for stage in plan.stages:
        learning = learning or stage.side == "learning"
        late = [name for name in (*stage.reads, *stage.writes) if FIELDS[name].clock == "learner"]
        if plan.lag and stage.side == "sampling" and (late or learning):
            found = f"that it reads or writes {late[0]}" if late else "it after stages that train"
            raise RecipeError(
                f"stage {stage.name}",
                f"{found} on the sampling side with rollout.lag {plan.lag}",
                "a stage of the step that trains, or fields that are frozen or of the weights that sampled",
                "the learner's fields depend on its weights in the step that trains",
            )


def chain(plan: Plan) -> str:
    return " → ".join(stage.name for stage in plan.stages)


def _check_reads(kept: Sequence[StageSpec], candidates: Sequence[StageSpec]) -> None:
    written: set[str] = set()
    for stage in kept:
        for name in stage.reads:
            if name not in written:
                others = [other.name for other in candidates if name in other.writes]
                raise RecipeError(
                    f"stage {stage.name}",
                    f"that it reads {name}, which no stage before it writes",
                    f"an earlier stage that writes {name}",
                    f"{' and '.join(others)} would, but not before it" if others else "",
                )
        written.update(stage.writes)


def _reason(stage: StageSpec, candidates: Sequence[StageSpec], why: Mapping[str, str]) -> str:
    if stage.skip_reason:
        return stage.skip_reason
    fields = " and ".join(stage.writes) or "anything of it"
    later = candidates[candidates.index(stage) + 1 :]
    readers = [other.name for other in later if set(stage.writes) & set(other.reads)]
    if readers:
        return f"nobody reads {fields}: {' and '.join(readers)} would, but is not run"
    reasons = [why[name] for name in stage.writes if why.get(name)]
    return f"nobody reads {fields}" + (f": {'; '.join(reasons)}" if reasons else "")
