"""Load, start or connect each teacher at its placement.

A new placement is a function in `PLACEMENTS`, and its recipe section.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.concurrency.busy_time import SharedBusyTime
from practicum.concurrency.event_loop import run_async
from practicum.devices import pick_device
from practicum.engines.kind import FrozenModel, HeldWeights
from practicum.engines.model_cache import ModelCache, make_model_cache
from practicum.engines.protocol import ScoreOptions, Scorer, Sleeper
from practicum.engines.table import ENGINES
from practicum.errors import RecipeError
from practicum.learning.objective import Head
from practicum.models.adapter_files import SavedAdapter
from practicum.models.attention import OutputHead
from practicum.models.model_files import read_config
from practicum.recipe.derived import base_groups, mixtures, products
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.runtime_section import Runtime
from practicum.recipe.schema.teacher_sections import Distill, Teacher
from practicum.teachers.remote_teacher import RemoteScorer, probe_teacher
from practicum.teachers.teacher_scorer import TeacherScorer


@dataclass(slots=True)
class Teachers:
    """The teachers of a run, and the parts of them that the learner needs."""

    scorers: dict[str, TeacherScorer]
    residency: ModelCache | None = None
    """Wakes colocated teachers. None if no teacher ever sleeps."""
    heads: dict[str, OutputHead] = field(default_factory=dict)
    """Output heads, if the signal is the full distribution."""
    least_width: int = 0
    """Hidden size of the widest teacher in other processes."""
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Exponents of targets that are products of teachers."""
    mixtures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Weights of targets that are mixtures of teachers."""

    def parts(self, name: str) -> Collection[str]:
        """Return the teachers that score a row of this teacher."""
        return self.targets.get(name) or self.mixtures.get(name) or (name,)

    @property
    def width(self) -> int:
        """Hidden size of the widest teacher, to which hidden states are padded. For a product, the hidden
        states of its teachers are concatenated."""
        widths = {name: head.weight.shape[1] for name, head in self.heads.items()}
        products = [sum(widths[part] for part in target) for target in self.targets.values()]
        return max([*widths.values(), *products] if widths else [self.least_width])

    def head(self, name: str) -> Head:
        """Return the head that computes logits of a teacher's target from hidden states of `width`.

        Products are summed in float64, so that exponents 1, 1, -1 with equal last two models reproduce the
        first model exactly.
        """
        exponents = self.targets.get(name, {name: 1.0})
        heads = [self.heads[part] for part in exponents]
        widths = [head.weight.shape[1] for head in heads]

        def logits(hidden_MH: Tensor) -> Tensor:
            rows = hidden_MH[:, : sum(widths)].split(widths, dim=1)
            parts = [head.logits(own_MH) for head, own_MH in zip(heads, rows, strict=True)]
            if len(parts) == 1 and name in exponents:
                return parts[0]
            scaled = [x.double() * e for x, e in zip(parts, exponents.values(), strict=True)]
            return torch.stack(scaled).sum(0).to(parts[0].dtype)

        return logits

    def awake(self, name: str) -> AbstractContextManager[None]:
        """Keep a teacher awake inside the context."""
        scorer = self.scorers[name]
        return self.residency.awake(scorer.model) if scorer.sleeper and self.residency else nullcontext()

    @property
    def wakes(self) -> dict[str, int]:
        """Number of wake-ups per colocated teacher. Teachers on the student's base never sleep."""
        if self.residency is None:
            return {}
        colocated = (s for s in self.scorers.values() if not s.spec.scores_during_rollout)
        return {scorer.name: self.residency.wakes.get(scorer.model, 0) for scorer in colocated}

    def close(self) -> None:
        """Stop all teachers, even if stopping one fails."""
        with ExitStack() as stack:
            for scorer in self.scorers.values():
                stack.callback(scorer.close)


@dataclass(frozen=True, slots=True)
class TeacherGroup:
    """Teachers that share a model, and the model's settings."""

    specs: dict[str, Teacher]
    model: FrozenModel
    adapters: dict[str, SavedAdapter]

    @property
    def first(self) -> tuple[str, Teacher]:
        return next(iter(self.specs.items()))

    def scorers(self, scorers: Sequence[Scorer], sleeper: Sleeper | None = None) -> dict[str, TeacherScorer]:
        """Return the group's teachers, which use these scorers of their model."""
        names, time = ", ".join(self.specs), SharedBusyTime(self.specs)
        model = f"the base of {names}" if len(self.specs) > 1 or self.adapters else names
        together_s = sum(spec.deadline_s for spec in self.specs.values())
        return {
            name: TeacherScorer(
                name,
                spec,
                scorers,
                deadline_s=spec.deadline_s if sleeper is None else together_s,
                sleeper=sleeper,
                model=model,
                adapter=self.adapters[name].fingerprint if name in self.adapters else None,
                time=time,
                held=self.model.held,
            )
            for name, spec in self.specs.items()
        }


def base_spec(student: Model, teacher: Teacher) -> Model:
    """Return the settings of a teacher's model: separate, the student's initial weights, or its base."""
    if teacher.model is not None:
        return Model(path=teacher.model, dtype=teacher.dtype, device=teacher.device)
    return student if teacher.student is not None else student.model_copy(update={"lora": None})


def describe_base(student: Model, teacher: Teacher) -> str:
    """Describe the base of a teacher's adapter."""
    return teacher.model or f"the student's base, {student.path or 'a randomly initialised model'}"


def make_group(
    specs: Mapping[str, Teacher],
    distill: Distill | None,
    source: Model,
    seed: int,
    student: PreTrainedModel | None = None,
) -> TeacherGroup:
    """Create a group of teachers that share a model. `source` has the student's settings. `student` is needed
    for copies of it and for sharing its base."""
    name, first = next(iter(specs.items()))
    adapters = {
        name: SavedAdapter.read(spec.adapter, f"teachers.{name}.adapter")
        for name, spec in specs.items()
        if spec.adapter is not None
    }
    limits = [spec.context for spec in specs.values()]
    model = FrozenModel(
        f"teachers.{name}",
        base_spec(source, first),
        seed,
        first,
        "model.path" if first.model is None else f"teachers.{name}.model",
        describe_base(source, first),
        batch_tokens=min(spec.batch_tokens for spec in specs.values()),
        context=None if None in limits else max(limit for limit in limits if limit is not None),
        top_k=top_k(distill),
        adapters=[*{saved.fingerprint: saved for saved in adapters.values()}.values()],
        student=student if first.model is None else None,
        held=None if first.student is None else HeldWeights(),
    )
    return TeacherGroup(dict(specs), model, adapters)


def load_colocated(group: TeacherGroup) -> dict[str, TeacherScorer]:
    """Load a model in this process. On the student's base, it needs no memory and never sleeps."""
    _, spec = group.first
    engine = ENGINES[spec.engine].for_scoring(group.model)
    sleeps = engine.owns_weights or group.model.held is not None
    return group.scorers([engine], engine if sleeps else None)


def _start_own(group: TeacherGroup) -> dict[str, TeacherScorer]:
    """Start separate processes, which score during the rollout."""
    _, spec = group.first
    return group.scorers(ENGINES[spec.engine].in_own_process(group.model, spec.own_options))


def connect(group: TeacherGroup) -> dict[str, TeacherScorer]:
    """Connect to a server, which `probe_servers` has checked."""
    name, spec = group.first
    return {name: TeacherScorer(name, spec, [RemoteScorer(name, spec)], deadline_s=None)}


PLACEMENTS: dict[str, Callable[[TeacherGroup], dict[str, TeacherScorer]]] = {
    "colocated": load_colocated,
    "own": _start_own,
    "url": connect,
}


def load_teachers(
    specs: Mapping[str, Teacher],
    distill: Distill | None,
    runtime: Runtime,
    source: Model,
    seed: int,
    student: PreTrainedModel,
    others: Mapping[str, Sleeper] | None = None,
    *,
    heads: Mapping[str, OutputHead] | None = None,
) -> Teachers:
    """Start these teachers. Colocated ones are asleep. If one fails, stop all.

    `source` has the student's settings, `others` are colocated models that share the memory budgets, and
    `heads` are output heads of teachers in other processes.
    """
    device = pick_device(source.device)  # the student may have no weights
    scorers: dict[str, TeacherScorer] = {}
    with ExitStack() as undo:
        for name, spec in specs.items():
            if name not in scorers:
                sharing = next((group for group in base_groups(specs) if name in group), [name])
                group = make_group({n: specs[n] for n in sharing}, distill, source, seed, student)
                scorers |= PLACEMENTS[spec.placement_name](group)
                undo.callback(scorers[name].close)
        scorers = {name: scorers[name] for name in specs}
        for scorer in scorers.values():
            for part in scorer.scorers:
                part.ready()
        known = {name: _moved(head, device) for name, head in (heads or {}).items()}
        if distill is not None and distill.signal == "full":
            own: dict[str, OutputHead] = {}  # one for all teachers on a base
            for name, scorer in scorers.items():
                if scorer.model not in own:
                    own[scorer.model] = _moved(scorer.scorers[0].head(), device)
                known[name] = own[scorer.model]
        _check_heads(known, student)
        sleepers = {s.model: s.sleeper for s in scorers.values() if s.sleeper is not None}
        residency = make_model_cache(runtime, {**sleepers, **(others or {})})
        undo.pop_all()
    return Teachers(scorers, residency, known, targets=products(specs), mixtures=mixtures(specs))


def probe_servers(
    teachers: Mapping[str, Teacher], distill: Distill | None, vocab: int, longest: Mapping[str, int]
) -> list[str]:
    """Check that teachers behind URLs can score the recipe's longest sequences."""
    options, findings = ScoreOptions(top_k=top_k(distill)), []
    for name, teacher in teachers.items():
        if teacher.url is None:
            continue
        with closing(RemoteScorer(name, teacher)) as scorer:
            probe = probe_teacher(scorer, options, vocab, longest[name])
            owner = f"the probe of teacher {name} at {teacher.url}"
            run_async(probe, timeout=teacher.deadline_s, owner=owner)
        findings.append(f"teacher {name}: {teacher.url} scores prompts, reproducibly")
    return findings


def top_k(distill: Distill | None) -> int:
    """Return the maximum top-k of requests to teachers."""
    asks = distill is not None and distill.compares_top and distill.signal != "student_top_k"
    return distill.top_k if distill is not None and asks else 0


def signal_width(teachers: Mapping[str, Teacher], distill: Distill | None, source: Model) -> int:
    """Return the hidden size of the widest teacher from the configs, or 0 without hidden states."""
    if distill is None or distill.signal != "full":
        return 0
    widths = {}
    for name, teacher in teachers.items():
        spec = base_spec(source, teacher)
        if spec.path is not None:
            widths[name] = read_config(spec.path).get_text_config().hidden_size
        elif spec.random_init is not None:
            widths[name] = spec.random_init.hidden
    joined = [sum(widths[part] for part in target) for target in products(teachers).values()]
    return max([*widths.values(), *joined])


def _moved(head: OutputHead, device: torch.device) -> OutputHead:
    bias = None if head.bias is None else head.bias.to(device)
    return replace(head, weight=head.weight.to(device), bias=bias)


def _check_heads(heads: dict[str, OutputHead], student: PreTrainedModel) -> None:
    own = student.config.get_text_config().vocab_size
    for name, head in heads.items():
        if head.weight.shape[0] != own:
            raise RecipeError(
                f"teachers.{name}.model",
                f"an output head for {head.weight.shape[0]} tokens",
                f"{own}, the student's",
                "set distill.signal: top_k",
            )
