"""One rank of the learner: the roles that live where the student learns, the same in every runtime.

The local runtime has one in its process; on Ray each `TrainWorker` has one. With several ranks all are called
alike, and the first writes what all have in common.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.own_stage import OwnStage
from practicum.dataplane.stages import Plan, StageSpec
from practicum.dataplane.store import Store
from practicum.dataplane.store_files import write_rows
from practicum.errors import RecipeError
from practicum.learning.learner import Learner
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.memory_probe import is_worth_trying, probe_memory
from practicum.learning.packed_model import PackedModel
from practicum.learning.parallel import Parallel
from practicum.learning.value_learner import ValueLearner
from practicum.models.adapter_files import save_base
from practicum.models.export_model import save_description
from practicum.models.load_model import context_length, load_tokenizer, stop_ids
from practicum.models.processor import save_processor
from practicum.models.vision import is_vision
from practicum.models.weight_files import WeightFiles, load_for_ranks
from practicum.recipe.derived import is_own_base, is_supervised, rollout_context
from practicum.recipe.own_parts import find_part, guarded
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.advantages import AdvantageRole
from practicum.roles.critic import CriticRole
from practicum.roles.load_teachers import teacher_losses
from practicum.roles.padding import PaddingRole, check_fields, field_widths, rank_share
from practicum.roles.run_stage import StepInfo, stage, stage_method
from practicum.roles.student import StudentRole
from practicum.roles.teachers import TeacherRole, Teachers
from practicum.roles.transcripts import Transcript, read_transcripts
from practicum.sessions.chat import make_encoder


class TrainRank:
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
        files: WeightFiles | None = None,
    ) -> None:
        """`files` are those of a model without weights: see `load_for_ranks`."""
        self.recipe, self.plan, self.store, self.watch, self.parallel = recipe, plan, store, watch, parallel
        self.rank, self.ranks = (0, 1) if parallel is None else (parallel.rank, parallel.world)
        self.encoder = make_encoder(recipe, load_tokenizer(recipe.model))
        self.stop = stop_ids(getattr(model, "generation_config", None), self.tokenizer, recipe.rollout.stop)
        roles = self._make_roles(model, teachers, files)
        self.stages: dict[str, Callable[[StepInfo], Any]] = {
            spec.name: self._own_stage(spec) if spec.use else stage_method(roles[spec.role], spec.name)
            for spec in plan
            if spec.ranks != "controller"
        }
        """Those that the ranks run, by name; each gives its report, or None if it had no row."""
        check_fields(plan, model)

    def describe_memory(self, planned: float | None = None) -> list[str]:
        """A run whose longest rows do not fit fails now; says how much memory they took, if they were tried.

        On a CPU, only a run that is `planned` to take much of the memory (bytes). Not demonstrations, whose
        lengths the recipe does not say, nor vision models.
        """
        recipe, learner = self.recipe, self.student.learner
        if is_vision(learner.model.config) or is_supervised(recipe):
            return []
        if not is_worth_trying(learner.trunk.device, planned):
            return []
        context = rollout_context(recipe, context_length(learner.model))
        response = min(recipe.rollout.max_new_tokens, context - 1)
        told = probe_memory(learner, context - response, response, planned)
        return [] if told is None else [told]

    def _own_stage(self, spec: StageSpec) -> Callable[[StepInfo], Any]:
        """A stage of the user's, with the rows of this rank or, on the first rank alone, all of them."""
        own = find_part("stage", spec.use, of=OwnStage)
        own.spec(spec.use)  # its fields, which padding and the store need to know
        rows = rank_share if spec.ranks == "all" else None
        return partial(stage(spec.name, rows=rows)(guarded(own.run, f"stages: {spec.use}")), self)

    def _make_roles(
        self, model: PreTrainedModel, teachers: Teachers | None, files: WeightFiles | None
    ) -> dict[str, object]:
        recipe, plan, store, parallel = self.recipe, self.plan, self.store, self.parallel
        self.teachers = self.critic = reference = None
        if teachers is not None:
            vocab = model.config.get_text_config().vocab_size
            options = {"vocab": vocab, "parallel": parallel}
            self.teachers = TeacherRole(recipe, plan, store, teachers, self.tokenizer, **options)
        refuse = partial(self.watch, "finite")
        if recipe.critic is not None:
            options = {"on_nonfinite": refuse, "parallel": parallel, "files": files}
            critic = ValueLearner(model, recipe.train, recipe.critic, **options)
            self.critic = CriticRole(recipe, plan, store, critic)
        if "ref_logprobs" in plan and not is_own_base(recipe):
            start, saved = load_reference(recipe, model, self.ranks)
            reference = LogprobScorer(PackedModel(start, recipe.train, parallel, files=saved))
        widths = field_widths(recipe, model, 0 if teachers is None else teachers.width)
        self.padding = PaddingRole(recipe, plan, store, self.tokenizer, widths, self.ranks)
        # Last: others copy the model whole, and the learner cuts it into shards.
        learner = Learner(
            model,
            recipe.train,
            recipe.algorithm,
            temperature=recipe.rollout.temperature,
            teaching=None if teachers is None else teacher_losses(recipe, teachers),
            on_nonfinite=refuse,
            parallel=parallel,
            files=files,
        )
        if self.teachers is not None:
            self.teachers.student = learner
        if "ref_logprobs" in plan and is_own_base(recipe):
            reference = LogprobScorer(learner.trunk, adapter=False)
        self.student = StudentRole(recipe, plan, store, learner, reference, self.watch)
        self.advantages = AdvantageRole(recipe, plan, store, self.watch)
        return {
            "teachers": self.teachers,
            "padding": self.padding,
            "student": self.student,
            "critic": self.critic,
            "advantages": self.advantages,
        }

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    @property
    def version(self) -> int:
        """Updates that the student's weights have had."""
        return self.student.learner.version

    def fingerprint(self, length: int) -> list[float]:
        """Logprobs of a fixed sequence of tokens by the learner's weights; all ranks must be called."""
        return self.student.learner.fingerprint(length).tolist()

    def transcripts(self, batch: BatchRef) -> list[Transcript]:
        """The rows as text."""
        return read_transcripts(self.store, self.tokenizer, batch)

    def session_advantages(self, batch: BatchRef) -> dict[tuple[int, ...], float]:
        """Each session's mean advantage over its sampled tokens; sessions without any are left out."""
        return self.advantages.session_means(batch)

    def kl_state(self) -> dict[str, float]:
        """State of the controller of a KL in the reward."""
        return self.advantages.state_dict()

    def updates(self) -> tuple[int, ...]:
        """Optimizer steps that student and critic have begun: while it stays, their state does."""
        critic = () if self.critic is None else (self.critic.critic.stepper.begun,)
        return self.student.learner.stepper.begun, *critic

    def save(self, folder: Path, rows: bool = True) -> None:
        """Write a checkpoint, or this rank's share of it; without `rows` the store is saved as empty."""
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
        if rows:
            self.store.save(folder / "store")
        else:
            write_rows(folder / "store", [])

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> int:
        """Continue from what `save` wrote, with any number of ranks; gives the weights' version."""
        self.student.learner.load(folder / "student")
        if self.critic is not None:
            self.critic.critic.load(folder / "critic")
        if self.teachers is not None:
            self.teachers.load(folder / "teachers")
        if self.rank == 0:
            self.store.load(folder / "store")
        self.advantages.load_state_dict(dict(kl_state))
        return self.version

    def export(self, folder: Path) -> None:
        """Write the student in HuggingFace format, its tokenizer and processor; an adapter also alone."""
        self.student.learner.export(folder, self.tokenizer)
        if self.rank == 0 and self.encoder.processor is not None:
            save_processor(self.encoder.processor, folder)


def load_reference(
    recipe: Recipe, student: PreTrainedModel, ranks: int = 1
) -> tuple[PreTrainedModel, WeightFiles | None]:
    """The reference policy, as `load_for_ranks`: a model of the student's vocabulary, or its start."""
    path, key = recipe.algorithm.kl.reference, "algorithm.kl.reference"
    reference, files = load_for_ranks(recipe.model, recipe.seed, ranks, path=path, key=key)
    own, other = (m.config.get_text_config().vocab_size for m in (student, reference))
    if own != other:
        expected = f"a model of the student's vocabulary of {own}"
        raise RecipeError(key, f"{path} with a vocabulary of {other} tokens", expected)
    return reference, files


def set_threads(threads: int | None, *, sides: int = 1) -> int:
    """Torch's threads: as the recipe says, else as OMP_NUM_THREADS says, else one per core.

    `sides` share the cores: engines and learner, if they work at once.
    """
    cores = max(1, (os.cpu_count() or 1) // sides)
    count = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or cores
    torch.set_num_threads(count)
    return count
