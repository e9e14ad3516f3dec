"""One rank of the learner with all roles that run on it, in every runtime.

The local runtime has one in its process. On Ray, each `TrainWorker` has one. All ranks receive the same
calls, and the first writes shared output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Columns
from practicum.dataplane.stages import OwnStage, Plan
from practicum.dataplane.store import Store
from practicum.errors import RecipeError
from practicum.learning.learner import Learner
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.objective import DistillSettings
from practicum.learning.packed_model import PackedModel
from practicum.learning.parallel import Parallel
from practicum.learning.value_learner import ValueLearner
from practicum.models.adapter_files import save_base
from practicum.models.load_model import load_model, load_tokenizer, stop_ids
from practicum.models.model_files import save_description
from practicum.observe.records.recorder import NOT_RECORDED, Recorder
from practicum.recipe.algorithm_traits import loss_traits
from practicum.recipe.own_parts import find_part, guarded
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.roles.advantages import AdvantageRole
from practicum.roles.critic import CriticRole
from practicum.roles.padding import BatchCutter, PaddingRole, check_fields, field_widths, rank_share
from practicum.roles.run_stage import StepInfo, stage, stage_method
from practicum.roles.stage_table import ratio_source
from practicum.roles.student import StudentRole
from practicum.roles.teachers import TeacherRole
from practicum.sessions.chat import make_encoder
from practicum.teachers.load_teachers import Teachers
from practicum.teachers.shared_tokens import shared_tokens


@dataclass(frozen=True, slots=True)
class Transcript:
    """A row as text, including special tokens. Empty for a failed session without tokens."""

    prompt: str = ""
    response: str = ""
    spans: tuple[dict[str, Any], ...] = ()
    """Spans of the response, sampled or inserted, with `sampled`, `text` and number of `tokens`."""


class LearnerRank:
    """Student, critic, advantages, colocated teachers and padding."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        watch: Watch,
        model: PreTrainedModel,
        teachers: Teachers | None,
        parallel: Parallel | None = None,
        recorder: Recorder = NOT_RECORDED,
    ) -> None:
        self.recorder = recorder
        self.recipe, self.plan, self.store, self.watch, self.parallel = recipe, plan, store, watch, parallel
        self.rank, self.ranks = (0, 1) if parallel is None else (parallel.rank, parallel.world)
        self.encoder = make_encoder(recipe, load_tokenizer(recipe.model))
        self.tokenizer: PreTrainedTokenizerBase = self.encoder.tokenizer
        self.stop = stop_ids(getattr(model, "generation_config", None), self.tokenizer, recipe.rollout.stop)
        self._make_roles(model, teachers)
        self.stages: dict[str, Callable[[StepInfo], Any]] = {}
        """Stages of the ranks by name. Each returns its report, or None without rows."""
        for spec in plan:
            if spec.use:
                own = find_part("stage", spec.use, of=OwnStage)
                own.spec(spec.use)  # registers its fields for padding and the store
                rows = {"rows": rank_share} if spec.ranks == "all" else {}
                decorated = stage(spec.name, **rows)(guarded(own.run, f"stages: {spec.use}"))
                self.stages[spec.name] = partial(decorated, self)
            elif spec.ranks != "controller":
                self.stages[spec.name] = stage_method(getattr(self, spec.role), spec.name)
        check_fields(plan, model)

    def _make_roles(self, model: PreTrainedModel, teachers: Teachers | None) -> None:
        recipe, plan, store, parallel = self.recipe, self.plan, self.store, self.parallel
        watch, recorder = self.watch, self.recorder
        cutter = BatchCutter(
            recipe.train,
            seed=recipe.seed,
            whole_sessions=loss_traits(recipe.algorithm.loss).whole_sessions and recipe.has_policy_loss,
            rank=self.rank,
            ranks=self.ranks,
        )
        self.teachers = self.critic = reference = None
        if teachers is not None:
            assert recipe.distill is not None
            self.teachers = TeacherRole(
                recipe.distill,
                plan,
                store,
                teachers,
                self.tokenizer,
                temperature=recipe.compare_temperature,
                vocab=model.config.get_text_config().vocab_size,
                shared=shared_tokens(recipe, self.tokenizer),
                parallel=parallel,
                recorder=recorder,
            )
        refuse = partial(watch, "finite")
        if recipe.critic is not None:
            options = {"on_nonfinite": refuse, "parallel": parallel}
            critic = ValueLearner(model, recipe.train, recipe.critic, **options)
            self.critic = CriticRole(plan, store, critic, cutter, recorder)
        if "ref_logprobs" in plan and not recipe.is_own_base:
            spec, path = recipe.model, recipe.algorithm.kl.reference
            start = load_reference(spec, recipe.seed, path, model, None if parallel is None else self.rank)
            reference = LogprobScorer(PackedModel(start, recipe.train, parallel))
        widths = field_widths(recipe.distill, model, 0 if teachers is None else teachers.width)
        self.padding = PaddingRole(plan, store, self.tokenizer, widths, cutter, recorder)
        teaching = None
        if teachers is not None and recipe.distill is not None:
            by_shares = recipe.route.balanced_by == "shares"
            numbers, shares = recipe.teacher_numbers, recipe.route.shares if by_shares else None
            teaching = DistillSettings(
                recipe.distill,
                recipe.compare_temperature,
                heads=[teachers.head(name) for name in numbers] if teachers.heads else (),
                alone=not recipe.has_policy_loss,
                shares=None if shares is None else {numbers[name]: share for name, share in shares.items()},
                project=recipe.route.project,
            )
        # Last, because the learner shards the model that others copy.
        learner = Learner(
            model,
            recipe.train,
            recipe.algorithm,
            temperature=recipe.rollout.temperature,
            teaching=teaching,
            on_nonfinite=refuse,
            parallel=parallel,
        )
        if self.teachers is not None:
            self.teachers.student = learner
        if "ref_logprobs" in plan and recipe.is_own_base:
            reference = LogprobScorer(learner.trunk, adapter=False)
        self.student = StudentRole(
            plan,
            store,
            learner,
            reference,
            watch,
            cutter,
            recorder,
            temperature=recipe.rollout.temperature,
            old=ratio_source(recipe),
            teachers={} if teachers is None else recipe.teacher_numbers,
            route=recipe.route,
        )
        learnt_from = recipe.algorithm, recipe.distill, recipe.reward.weight
        self.advantages = AdvantageRole(*learnt_from, plan, store, watch, recorder)

    @property
    def version(self) -> int:
        return self.student.learner.version

    def fingerprint(self, length: int) -> list[float]:
        return self.student.learner.fingerprint(length).tolist()

    def transcripts(self, batch: BatchRef) -> list[Transcript]:
        written = batch.where(lambda _, tags: tags.prompt_tokens > 0)
        if not written:
            return [Transcript()] * len(batch)
        names, decode = ("prompt_ids", "response_ids", "response_mask"), self.tokenizer.decode
        columns = Columns("transcripts", self.store.get(written, names))
        rows = zip(*(columns.ragged(name).rows for name in names), strict=True)
        transcripts = {}
        for key, (prompt, response, mask) in zip(written.keys, rows, strict=True):
            spans, at = [], 0
            for sampled, run in groupby(mask.tolist()):
                end = at + len(list(run))
                spans.append({"sampled": sampled, "text": str(decode(response[at:end])), "tokens": end - at})
                at = end
            transcripts[key] = Transcript(str(decode(prompt)), str(decode(response)), tuple(spans))
        return [transcripts.get(key, Transcript()) for key in batch.keys]

    def refresh_copies(self, step: int) -> None:
        if self.teachers is not None:
            self.teachers.refresh(step)

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        assert self.teachers is not None
        return self.teachers.spent()

    def session_advantages(self, batch: BatchRef) -> dict[tuple[int, ...], float]:
        columns = Columns("records", self.store.get(batch, ("advantages", "response_mask")))
        sums: dict[tuple[int, ...], tuple[float, int]] = {}
        rows = zip(columns.ragged("advantages").rows, columns.ragged("response_mask").rows, strict=True)
        for key, (advantages, mask) in zip(batch.keys, rows, strict=True):
            total, count = sums.get(key[:2], (0.0, 0))
            sums[key[:2]] = total + float(advantages[mask].sum()), count + int(mask.sum())
        return {name: total / count for name, (total, count) in sums.items() if count}

    def kl_state(self) -> dict[str, float]:
        return self.advantages.kl.state_dict() | self.student.balance.state_dict()

    def updates(self) -> tuple[int, ...]:
        critic = () if self.critic is None else (self.critic.critic.stepper.begun,)
        return self.student.learner.stepper.begun, *critic

    def save(self, folder: Path, rows: Collection[Key]) -> None:
        """Write this rank's share of a checkpoint, with these rows of the store."""
        self.student.learner.save(folder / "student")
        if self.critic is not None:
            self.critic.critic.save(folder / "critic")
        if self.rank:
            return
        model, processor = self.student.learner.model, self.encoder.processor
        save_description(folder / "model", model, self.tokenizer, processor)
        if self.recipe.model.lora is not None:
            save_base(folder / "student", self.recipe.model, self.recipe.seed)
        if self.teachers is not None:
            self.teachers.save(folder / "teachers")
        self.store.save(folder / "store", rows)

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> int:
        """Load a checkpoint, written by any number of ranks, and return the weight version."""
        self.student.learner.load(folder / "student")
        if self.critic is not None:
            self.critic.critic.load(folder / "critic")
        if self.teachers is not None:
            self.teachers.load(folder / "teachers")
        if self.rank == 0:
            self.store.load(folder / "store")
            self.recorder.restore(folder / "store")
        balance = {name: value for name, value in kl_state.items() if "/" in name}
        self.student.balance.load_state_dict(balance)
        self.advantages.kl.load_state_dict({k: v for k, v in kl_state.items() if k not in balance})
        return self.version

    def export(self, folder: Path) -> None:
        """Export the student in HuggingFace format with tokenizer and processor, its adapter separately."""
        self.student.learner.export(folder, self.tokenizer)
        if self.rank == 0 and self.encoder.processor is not None:
            self.encoder.processor.image_processor.save_pretrained(folder)


def load_reference(
    spec: Model, seed: int, path: str | None, student: PreTrainedModel, rank: int | None = None
) -> PreTrainedModel:
    """Load the reference policy: a model with the student's vocabulary, or the student's initial weights."""
    key = "algorithm.kl.reference"
    reference = load_model(spec, seed, path=path, key=key, rank=rank)
    own, other = (m.config.get_text_config().vocab_size for m in (student, reference))
    if own != other:
        expected = f"a model with the student's {own} tokens"
        raise RecipeError(key, f"{path} with a vocabulary of {other} tokens", expected)
    return reference


def set_threads(threads: int | None, *, sides: int = 1) -> int:
    """Set torch's threads from the recipe, OMP_NUM_THREADS, or the cores, which `sides` share."""
    cores = max(1, (os.cpu_count() or 1) // sides)
    count = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or cores
    torch.set_num_threads(count)
    return count
