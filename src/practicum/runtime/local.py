"""All roles in this process: the learner and the engine share one model object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.plan import Plan, evaluation_plan
from practicum.dataplane.store import Store
from practicum.engines.protocol import Engine
from practicum.errors import RecipeError
from practicum.learning.learner import Learner
from practicum.learning.logprob_scorer import LogprobScorer
from practicum.learning.packed_model import PackedModel
from practicum.learning.parallel import Parallel
from practicum.learning.value_learner import ValueLearner
from practicum.models.load_model import context_length, load_model, load_tokenizer, stop_ids
from practicum.places.model_cache import ModelCache
from practicum.recipe.derived import evaluates, rollout_context
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.advantages import AdvantageRole
from practicum.roles.checkpoint import export_student, load_roles, save_roles, updates_begun
from practicum.roles.critic import CriticRole
from practicum.roles.load_teachers import load_teachers, make_model_cache, teacher_losses
from practicum.roles.make_engine import describe_engines, make_engine
from practicum.roles.padding import check_fields, field_widths, put_padding, row_texts
from practicum.roles.reward_models import RewardModelRole, RewardModels, load_reward_models
from practicum.roles.rollout import RolloutRole
from practicum.roles.session_runner import SessionRunner
from practicum.roles.student import StudentRole, UpdateReport
from practicum.roles.sync import SyncProbe
from practicum.roles.teachers import TeacherRole, Teachers
from practicum.sessions.prompt_encoder import Encoder, make_encoder
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.rewards import RewardFunctions


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """Models beside the student: teachers, reward models, and where the colocated ones sleep."""

    staff: Teachers | None
    panel: RewardModels
    residency: ModelCache

    def close(self) -> None:
        """Stop all of them."""
        with ExitStack() as stack:
            stack.callback(self.panel.close)
            if self.staff is not None:
                stack.callback(self.staff.close)


@dataclass(slots=True)
class LocalRoles:
    """Everyone who takes part in a run, in this process; see `roles.Roles`."""

    plan: Plan
    store: Store
    encoder: Encoder
    stop: frozenset[int]
    engine: Engine
    practice: RolloutRole
    faculty: TeacherRole | None
    examiner: RolloutRole
    student: StudentRole
    credit: AdvantageRole
    valuation: CriticRole | None
    hired: FrozenModels
    toolbox: Toolbox
    widths: Mapping[str, int]
    probe: SyncProbe
    ranks: int = 1

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    @property
    def version(self) -> int:
        return self.student.learner.version

    def describe(self) -> list[str]:
        places = [] if self.faculty is None else self.faculty.staff.places.values()
        return describe_engines(self.engine, *places)

    def refresh_copies(self, step: int) -> None:
        if self.faculty is not None:
            learner = self.student.learner
            self.faculty.refresh(step, lambda: dict(learner.named_weights()), learner.version)

    def teach(self, batch: BatchRef) -> None:
        assert self.faculty is not None
        self.faculty.score(self.faculty.waiting(batch), prompts=self.practice.prompts)

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        assert self.faculty is not None
        return self.faculty.spent()

    def pad(self, partition: str, count: int) -> BatchRef:
        return put_padding(self.store, self.plan, partition, count, self.tokenizer, self.widths)

    def old_logprobs(self, batch: BatchRef) -> None:
        self.student.old_logprobs(batch)

    def ref_logprobs(self, batch: BatchRef) -> None:
        self.student.ref_logprobs(batch)

    def values(self, batch: BatchRef) -> None:
        assert self.valuation is not None
        self.valuation.values(batch)

    def advantages(self, batch: BatchRef, baselines: Mapping[int, float]) -> dict[str, float]:
        return self.credit.advantages(batch, baselines=baselines) or {}

    def update_critic(self, batch: BatchRef, step: int) -> dict[str, float]:
        assert self.valuation is not None
        return self.valuation.update(batch, step=step) or {}

    def update_student(self, batch: BatchRef, step: int) -> UpdateReport:
        learnt = self.student.update(batch, step=step)
        assert learnt is not None
        return learnt

    def sync_weights(self) -> None:
        learner = self.student.learner
        self.engine.load_weights(learner.named_weights(), learner.version)
        self.probe_weights()

    def probe_weights(self) -> None:
        """Whether the engine has the learner's weights."""
        if self.probe.looks:
            found = [self.engine.fingerprint().tolist()]
            self.probe.check(found, lambda length: self.student.learner.fingerprint(length).tolist())

    def texts(self, batch: BatchRef) -> list[tuple[str, str]]:
        return row_texts(self.store, self.tokenizer, batch)

    def kl_state(self) -> dict[str, float]:
        return self.credit.state_dict()

    def updates(self) -> tuple[int, ...]:
        return updates_begun(self)

    def save(self, folder: Path, *, rows: bool = True) -> None:
        save_roles(self, folder, rows=rows)

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> None:
        load_roles(self, folder, kl_state)
        self.sync_weights()

    def export(self, folder: Path) -> None:
        export_student(self, folder)

    def incidents(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Stop what runs in the background."""
        with ExitStack() as stack:
            stack.callback(self.engine.close)
            stack.callback(self.toolbox.close)
            stack.callback(self.hired.close)


def set_threads(threads: int | None) -> int:
    """Torch's threads: as the recipe says, else as OMP_NUM_THREADS says, else one per core."""
    wanted = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or (os.cpu_count() or 1)
    torch.set_num_threads(wanted)
    return wanted


def load_reference(recipe: Recipe, student: PreTrainedModel) -> PreTrainedModel:
    """The reference policy: a model of the student's vocabulary, or the student's start."""
    path, key = recipe.algorithm.kl.reference, "algorithm.kl.reference"
    reference = load_model(recipe.model, recipe.seed, path=path, key=key)
    own, other = (m.config.get_text_config().vocab_size for m in (student, reference))
    if own != other:
        expected = f"a model of the student's vocabulary of {own}"
        raise RecipeError(key, f"{path} with a vocabulary of {other} tokens", expected)
    return reference


def load_frozen_models(recipe: Recipe, plan: Plan, student: PreTrainedModel) -> FrozenModels:
    """Teachers and reward models, as far as the plan or evaluations ask them."""
    panel = RewardModels()
    if recipe.reward.models and ("reward" in plan or evaluates(recipe)):
        # Another tokenizer may need more tokens than the student's for the same text.
        panel = load_reward_models(recipe, room=2 * rollout_context(recipe, None))
    with ExitStack() as undo:
        undo.callback(panel.close)
        staff = load_teachers(recipe, student, panel.sleepers()) if "teachers" in plan else None
        residency = make_model_cache(recipe, panel.sleepers()) if staff is None else staff.residency
        undo.pop_all()
    return FrozenModels(staff, panel, residency)


def start_local(recipe: Recipe, plan: Plan, watch: Watch) -> LocalRoles:
    """Load the models and connect the roles; if that fails, nothing stays behind."""
    set_threads(recipe.runtime.threads)
    model = load_model(recipe.model, recipe.seed)
    hired = load_frozen_models(recipe, plan, model)
    with ExitStack() as undo:
        undo.callback(hired.close)
        learner = make_learner(recipe, model, hired.staff, watch)
        engine = make_engine(recipe, model, lambda: (learner.named_weights(), learner.version))
        undo.callback(engine.close)
        roles = _connect(recipe, plan, watch, model, hired, learner, engine)
        roles.probe_weights()
        undo.pop_all()
    return roles


def make_learner(
    recipe: Recipe,
    model: PreTrainedModel,
    staff: Teachers | None,
    watch: Watch,
    parallel: Parallel | None = None,
) -> Learner:
    """The student as it learns, with what it must know of its teachers; a share of it on several ranks."""
    return Learner(
        model,
        recipe.train,
        recipe.algorithm,
        temperature=recipe.rollout.temperature,
        teaching=None if staff is None else teacher_losses(recipe, staff),
        on_nonfinite=partial(watch, "finite"),
        parallel=parallel,
    )


def _connect(
    recipe: Recipe,
    plan: Plan,
    watch: Watch,
    model: PreTrainedModel,
    hired: FrozenModels,
    learner: Learner,
    engine: Engine,
) -> LocalRoles:
    encoder, store, staff = make_encoder(recipe, load_tokenizer(recipe.model)), MemoryStore(), hired.staff
    reference = None
    if "ref_logprobs" in plan:
        reference = LogprobScorer(PackedModel(load_reference(recipe, model), recipe.train))
    vocab = model.config.get_text_config().vocab_size
    faculty = None
    if staff is not None:
        faculty = TeacherRole(recipe, plan, store, staff, engine, encoder.tokenizer, vocab=vocab)
    valuation = None
    if recipe.critic is not None:
        critic = ValueLearner(model, recipe.train, recipe.critic, on_nonfinite=partial(watch, "finite"))
        valuation = CriticRole(recipe, plan, store, critic)
    exam, toolbox = evaluation_plan(), Toolbox(recipe.agent.tools)
    check_fields(recipe, plan, model)
    sessions = partial(
        SessionRunner,
        recipe,
        store=store,
        engine=engine,
        encoder=encoder,
        judge=RewardFunctions(recipe.tasks, recipe.reward),
        toolbox=toolbox,
        context=rollout_context(recipe, context_length(model)),
        config=model.config,
    )

    def jury(plan: Plan) -> RewardModelRole | None:
        asked = hired.panel.places and "reward" in plan
        return RewardModelRole(recipe, hired.panel, hired.residency, engine) if asked else None

    teacher_of = None if faculty is None else faculty.teacher_of
    return LocalRoles(
        plan=plan,
        store=store,
        encoder=encoder,
        stop=stop_ids(model, encoder.tokenizer, recipe.rollout.stop),
        engine=engine,
        practice=RolloutRole(sessions(plan, teacher_of=teacher_of), faculty, jury(plan)),
        faculty=faculty,
        examiner=RolloutRole(sessions(exam), jury=jury(exam)),
        student=StudentRole(recipe, plan, store, learner, reference, watch),
        credit=AdvantageRole(recipe, plan, store),
        valuation=valuation,
        hired=hired,
        toolbox=toolbox,
        widths=field_widths(recipe, model, 0 if staff is None else staff.width),
        probe=SyncProbe(recipe, watch),
    )
