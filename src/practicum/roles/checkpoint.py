"""What a run keeps on disk of those who learn: the parts of a checkpoint, and the student for others.

The same in every runtime. With several ranks all are called, and the first writes what all have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from practicum.dataplane.store import Store
from practicum.dataplane.store_files import write_rows
from practicum.models.processor import save_processor
from practicum.roles.advantages import AdvantageRole
from practicum.roles.critic import CriticRole
from practicum.roles.student import StudentRole
from practicum.roles.teachers import TeacherRole
from practicum.sessions.prompt_encoder import Encoder


class LearningRoles(Protocol):
    """A process in which the student learns."""

    @property
    def student(self) -> StudentRole: ...
    @property
    def valuation(self) -> CriticRole | None: ...
    @property
    def faculty(self) -> TeacherRole | None: ...
    @property
    def credit(self) -> AdvantageRole: ...
    @property
    def store(self) -> Store: ...
    @property
    def encoder(self) -> Encoder: ...


def updates_begun(of: LearningRoles) -> tuple[int, ...]:
    """Optimizer steps that student and critic have begun: while it stays, their state does."""
    critic = () if of.valuation is None else (of.valuation.critic.stepper.begun,)
    return of.student.learner.stepper.begun, *critic


def save_roles(of: LearningRoles, folder: Path, *, rows: bool = True, first: bool = True) -> None:
    """Write a checkpoint, or this rank's share of it; without `rows` the store is saved as empty."""
    of.student.learner.save(folder / "student")
    if of.valuation is not None:
        of.valuation.critic.save(folder / "critic")
    if not first:
        return
    if of.faculty is not None:
        of.faculty.save(folder / "teachers")
    if rows:
        of.store.save(folder / "store")
    else:
        write_rows(folder / "store", [])


def load_roles(of: LearningRoles, folder: Path, kl_state: Mapping[str, float], *, first: bool = True) -> None:
    """Continue from what `save_parts` wrote, by any number of ranks."""
    of.student.learner.load(folder / "student")
    if of.valuation is not None:
        of.valuation.critic.load(folder / "critic")
    if of.faculty is not None:
        of.faculty.load(folder / "teachers")
    if first:
        of.store.load(folder / "store")
    of.credit.load_state_dict(dict(kl_state))


def export_student(of: LearningRoles, folder: Path, *, first: bool = True) -> None:
    """Write the student in HuggingFace format."""
    of.student.learner.export(folder, of.encoder.tokenizer)
    if first and of.encoder.processor is not None:
        save_processor(of.encoder.processor, folder)
