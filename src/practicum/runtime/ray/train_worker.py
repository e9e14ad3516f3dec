"""One data-parallel rank: the learner's and the critic's share, the reference, colocated teachers.

All ranks are called alike and with whole batches; each finds its own rows by their tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from transformers import PreTrainedModel

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.plan import Plan
from practicum.learning.logprob_scorer import LogprobScorer
from practicum.learning.packed_model import PackedModel
from practicum.learning.parallel import Parallel, free_port
from practicum.learning.value_learner import ValueLearner
from practicum.models.load_model import load_model, load_tokenizer, stop_ids
from practicum.models.output_head import OutputHead
from practicum.recipe.derived import scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.advantages import AdvantageRole
from practicum.roles.checkpoint import export_student, load_roles, save_roles, updates_begun
from practicum.roles.critic import CriticRole
from practicum.roles.load_teachers import load_teachers
from practicum.roles.padding import check_fields, field_widths, put_padding, row_texts
from practicum.roles.student import StudentRole
from practicum.roles.teachers import TeacherRole, Teachers, copy_file, read_copy
from practicum.runtime.local import load_reference, make_learner
from practicum.runtime.ray.weight_transport import Manifest, publish
from practicum.runtime.ray.worker import NoEngine, RankReply, StoreHandle, Worker
from practicum.sessions.prompt_encoder import make_encoder
from practicum.tasks.prompts import Prompt


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where the ranks of a group find each other."""

    address: str
    port: int
    world: int


@dataclass(frozen=True, slots=True)
class StudentFacts:
    """What the controller must know of the student."""

    stop: frozenset[int]
    version: int


class TrainWorker(Worker):
    """A rank. `begin` makes it ready; then its methods are the learner's stages."""

    LASTING = False

    def __init__(self, recipe: Recipe, handle: StoreHandle, plan: Plan, rank: int) -> None:
        super().__init__(recipe, handle)
        self.plan, self.rank = plan, rank
        self._sentences: list[str] = []
        self.watch = Watch(recipe.checks, self._sentences.append)
        self.parallel: Parallel | None = None

    def meeting_point(self, world: int) -> RankAddress:
        """An address of this rank's machine, and a port that is free on it."""
        address = ray.util.get_node_ip_address()
        return RankAddress(address, free_port(address), world)

    def begin(self, meeting: RankAddress, names: Sequence[str] = (), *heads: OutputHead) -> StudentFacts:
        """Join the others and load the models; `heads` are those of the teachers elsewhere of these names."""
        recipe, plan = self.recipe, self.plan
        model = load_model(recipe.model, recipe.seed)
        if meeting.world > 1:
            where = meeting.world, meeting.address, meeting.port, recipe.runtime.stage_s
            self.parallel = Parallel.join(self.rank, *where, device=model.device.type)
        check_fields(recipe, plan, model)
        self.encoder = make_encoder(recipe, load_tokenizer(recipe.model))
        staff = self._hire(model, dict(zip(names, heads, strict=True)))
        self.widths = field_widths(recipe, model, 0 if staff is None else staff.width)
        stop = stop_ids(model, self.encoder.tokenizer, recipe.rollout.stop)
        self.faculty, self.valuation = self._faculty(model, staff), self._valuation(model)
        reference = None
        if "ref_logprobs" in plan:
            reference = LogprobScorer(PackedModel(load_reference(recipe, model), recipe.train, self.parallel))
        # Last: others copy the model whole, and the learner cuts it into shards.
        learner = make_learner(recipe, model, staff, self.watch, self.parallel)
        self.student = StudentRole(recipe, plan, self.store, learner, reference, self.watch)
        self.credit = AdvantageRole(recipe, plan, self.store)
        return StudentFacts(stop, learner.version)

    def _hire(self, model: PreTrainedModel, heads: dict[str, OutputHead]) -> Teachers | None:
        if "teachers" not in self.plan:
            return None
        here = [name for name, teacher in self.recipe.teachers.items() if not scores_during_rollout(teacher)]
        return load_teachers(self.recipe, model, names=here, heads=heads)

    def _faculty(self, model: PreTrainedModel, staff: Teachers | None) -> TeacherRole | None:
        if staff is None:
            return None
        vocab = model.config.get_text_config().vocab_size
        known = self.store, staff, NoEngine(), self.encoder.tokenizer
        return TeacherRole(self.recipe, self.plan, *known, vocab=vocab)

    def _valuation(self, model: PreTrainedModel) -> CriticRole | None:
        if self.recipe.critic is None:
            return None
        refuse = partial(self.watch, "finite")
        critic = ValueLearner(
            model, self.recipe.train, self.recipe.critic, on_nonfinite=refuse, parallel=self.parallel
        )
        return CriticRole(self.recipe, self.plan, self.store, critic)

    def old_logprobs(self, batch: BatchRef) -> RankReply:
        return self._reply(self.student.old_logprobs(batch))

    def ref_logprobs(self, batch: BatchRef) -> RankReply:
        return self._reply(self.student.ref_logprobs(batch))

    def values(self, batch: BatchRef) -> RankReply:
        assert self.valuation is not None
        return self._reply(self.valuation.values(batch))

    def advantages(self, batch: BatchRef, baselines: Mapping[int, float]) -> RankReply:
        """Of the whole batch: called on one rank."""
        return self._reply(self.credit.advantages(batch, baselines=baselines) or {})

    def update_critic(self, batch: BatchRef, step: int) -> RankReply:
        assert self.valuation is not None
        return self._reply(self.valuation.update(batch, step=step) or {})

    def update_student(self, batch: BatchRef, step: int) -> RankReply:
        """Gives what was learnt, and the version of the weights."""
        learnt = self.student.update(batch, step=step)
        return self._reply((learnt, self.student.learner.version))

    def score(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> RankReply:
        """Rows that colocated teachers correct; each rank is given its own."""
        assert self.faculty is not None
        self.faculty.score(batch, prompts=prompts)
        return self._reply(self.faculty.spent())

    def refresh_copies(self, step: int) -> RankReply:
        assert self.faculty is not None
        learner = self.student.learner
        self.faculty.refresh(step, lambda: dict(learner.named_weights()), learner.version)
        return self._reply()

    def renew_head(self, name: str, head: OutputHead) -> RankReply:
        """A teacher elsewhere has another output head now."""
        assert self.faculty is not None
        self.faculty.renew_head(name, head)
        return self._reply()

    def pad(self, partition: str, count: int) -> RankReply:
        """Write padding rows: called on one rank."""
        known = self.encoder.tokenizer, self.widths
        return self._reply(put_padding(self.store, self.plan, partition, count, *known))

    def texts(self, batch: BatchRef) -> RankReply:
        """Rows as people read them: called on one rank."""
        return self._reply(row_texts(self.store, self.encoder.tokenizer, batch))

    def publish(self) -> Manifest | None:
        """The weights for the engines, by the first rank; all ranks must be called."""
        learner = self.student.learner
        if self.rank == 0:
            return publish(learner.named_weights(), learner.version)
        for _ in learner.named_weights():
            pass  # takes part in gathering each
        return None

    def fingerprint(self, length: int) -> list[float]:
        """Of the learner's weights, for a sequence of so many tokens; all ranks must be called."""
        return self.student.learner.fingerprint(length).tolist()

    def publish_copy(self, folder: Path, name: str) -> Manifest | None:
        """The weights that a teacher elsewhere, a copy of the student, had when it saved them, if it did.

        Called on one rank, which lives as long as the run: those of a teacher would die with it.
        """
        path = copy_file(folder, name)
        if not path.is_file():
            return None
        weights, version = read_copy(path)
        return publish(weights.items(), version)

    def kl_state(self) -> dict[str, float]:
        return self.credit.state_dict()

    def updates(self) -> tuple[int, ...]:
        """Optimizer steps that this rank has begun."""
        return updates_begun(self)

    def save(self, folder: Path, rows: bool = True) -> None:
        """Write this rank's share of a checkpoint; the first rank writes what all have, and the store."""
        save_roles(self, folder, rows=rows, first=self.rank == 0)

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> int:
        """Go on from what `save` wrote, by any number of ranks; gives the version."""
        load_roles(self, folder, kl_state, first=self.rank == 0)
        return self.student.learner.version

    def export(self, folder: Path) -> None:
        """Write the student in HuggingFace format; all ranks must be called."""
        export_student(self, folder, first=self.rank == 0)

    def leave(self) -> None:
        """Take leave of the other ranks, so that all end well."""
        if self.parallel is not None:
            self.parallel.close()

    def _reply(self, value: Any = None) -> RankReply:
        sentences, fired = tuple(self._sentences), dict(self.watch.fired)
        self._sentences.clear()
        self.watch.fired.clear()
        return RankReply(value, sentences, fired)
